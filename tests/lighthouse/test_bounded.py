"""Thousands of joins, leaves and beats against a real lighthouse process: nothing of it grows without end."""

import http.client
import json
import socket
import sqlite3
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from ft_hsdp import protocol
from ft_hsdp.core.grant import Continue, Grant
from ft_hsdp.core.host_report import MachineRanks
from ft_hsdp.protocol import Telemetry
from tests.support.lighthouse.lighthouse_helpers import START, name, record
from tests.support.lighthouse.program import Program, furnish
from tests.support.lighthouse.signed import Signer

MIB = 2**20


class Line:
    """A connection of a process of its own, from one of several addresses: each has its own rate."""

    def __init__(self, port: int, source: str) -> None:
        self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=20, source_address=(source, 0))
        self._signer = Signer(f"http://127.0.0.1:{port}")

    def send(self, path: str, message: object) -> None:
        """A request whose answer is read later."""
        body = protocol.encode(message)
        self._http.request("POST", path, body, self._signer.headers("POST", path, body))

    def answer(self, *expected: type) -> Any:
        response = self._http.getresponse()
        body = response.read()
        assert response.status in (200, 204), body
        return protocol.decode(body, *expected) if expected else None

    def close(self) -> None:
        if self._http.sock is not None:
            self._http.sock.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )  # keeps no port
        self._http.close()


def sizes(run: Path, pid: int) -> dict[str, float]:
    """What could grow: memory in MiB, descriptors, and rows of the tables in the store."""
    with sqlite3.connect(run / "lighthouse" / "store.sqlite", timeout=5) as db:
        rows = {key: json.loads(value) for key, value in db.execute("SELECT name, value FROM durable")}
    db.close()
    process = psutil.Process(pid)
    tables = {key: float(len(rows[key])) for key in ("exited", "epochs")}
    return {"rss": process.memory_info().rss / MIB, "fds": float(process.num_fds()), **tables}


def storm(lighthouse: Program, rounds: int, looks: int) -> list[dict[str, float]]:
    """Replica 1 joins, beats and leaves `rounds` times while replica 0 trains; the sizes at `looks` moments."""
    port, made = int(lighthouse.url.rpartition(":")[2]), lighthouse.message
    steady = Line(port, "127.0.0.2")
    watches = [Line(port, f"127.0.0.{n}") for n in range(3, 9)]
    seen: list[dict[str, float]] = []

    def report(turn: int, begun: str = "", ended: str = "", done: bool = False) -> None:
        line = watches[turn % len(watches)]
        gone = MachineRanks(ended, "here", 1, gone=True, done=done) if ended else None
        line.send("/v1/processes", protocol.ProcessReport(begun, gone))
        line.answer(protocol.SupervisorReply)

    held = START

    def commit() -> protocol.QuorumRequest:
        """Replica 0 reports the next step, alone and with its record."""
        nonlocal held
        done = replace(record(held, epoch), total=2)
        held = done.state_id
        return made(0, held, epoch=epoch, committed=done)

    report(0, name(0), name(1), done=True)
    steady.send("/v1/quorum", made(0))
    epoch = steady.answer(Grant).epoch
    for turn in range(rounds):
        life = turn + 1
        report(3 * turn, name(1, life))
        joiner = Line(port, f"127.0.0.{9 + turn % 8}")
        joiner.send("/v1/quorum", made(1, life=life))
        while True:  # until the joiner's ask has been read
            steady.send("/v1/quorum", commit())
            granted = steady.answer(Grant, Continue)
            if isinstance(granted, Grant):
                epoch = granted.epoch
                break
        assert joiner.answer(Grant).epoch == epoch
        joiner.send("/v1/telemetry", Telemetry(name(1, life)))
        joiner.answer()
        joiner.close()
        report(3 * turn + 1, ended=name(1, life))
        steady.send("/v1/quorum", commit())
        epoch = steady.answer(Grant).epoch
        if (turn + 1) % (rounds // looks) == 0:
            seen.append(sizes(lighthouse.run, lighthouse.process.pid))
    for line in (steady, *watches):
        line.close()
    return seen


def flat(seen: list[dict[str, float]], rss_mib: float) -> None:
    """The second half is no larger than the first; memory may have `rss_mib` more until all caches are full."""
    print("\n".join(map(str, seen)))
    half = len(seen) // 2
    first, second = seen[:half], seen[half:]
    assert max(s["exited"] for s in seen) <= 4
    assert max(s["epochs"] for s in seen) <= 4
    assert max(s["fds"] for s in second) <= max(s["fds"] for s in first) + 4
    assert max(s["rss"] for s in second) <= max(s["rss"] for s in first) + rss_mib


LONG = pytest.param(10_000, 20, 3.0, marks=pytest.mark.soak)


@pytest.mark.parametrize(("rounds", "looks", "rss_mib"), [(340, 10, 32.0), LONG])
def test_many_joins_leaves_and_beats_leave_nothing_behind(
    tmp_path, rounds: int, looks: int, rss_mib: float
) -> None:
    with Program(furnish(tmp_path / "job", train={"steps": 10**6})) as lighthouse:
        flat(storm(lighthouse, rounds, looks), rss_mib)

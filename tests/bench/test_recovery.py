from __future__ import annotations

import io
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from typing import Any

import pytest

from ft_hsdp.bench import goals
from ft_hsdp.bench.recovery import readers as bad_readers
from ft_hsdp.bench.recovery.analysis import Kill, came_back, failures_of, phases, quantile, repeated, stall
from ft_hsdp.bench.recovery.bench import RecoveryOptions, kill_row, run, stops
from ft_hsdp.bench.recovery.readers import READERS, BadReaders
from ft_hsdp.bench.recovery.setup import RecoverySetup
from ft_hsdp.bench.recovery.torchft_under_test import Setting, torchft
from ft_hsdp.bench.results import MIB, ProgressLog
from ft_hsdp.handshake import Purpose
from ft_hsdp.launch.cli import main
from tests.support.bench.tables import shown
from tests.support.known import admit

SMALL = RecoverySetup(replicas=2, layers=1, elements=256, wait_s=0.02)


def commit(
    t: float, step: int, contributors: list[int], ftar: float = 0.01, agree: float = 0.01
) -> dict[str, Any]:
    waits = {"ftar": ftar, "commit": agree}
    epoch = 2 if len(contributors) < 3 else 1
    whole = {"t": t, "step": step, "contributors": contributors, "total": 3, "waits": waits, "step_s": 1.0}
    names = {"lineage": f"L{step}", "prev": f"L{step - 1}", "attempt": 0, "role": "contribute"}
    return {**whole, **names, "epoch": epoch}


def event(t: float, name: str, replica: int, **facts: Any) -> dict[str, Any]:
    return {"t": t, "event": name, "replica": replica, **facts}


KILL = Kill(12.25, 2, 0, "2-a-0")
WHOLE = [0, 1, 2]
ROWS = {
    0: [commit(11, 1, WHOLE), commit(12, 2, WHOLE), commit(13.5, 3, [0, 1]), commit(14.5, 4, [0, 1])],
    1: [commit(11, 1, WHOLE), commit(12, 2, WHOLE), commit(13.6, 3, [0, 1], 0.5, 0.1), commit(14.5, 4, [0, 1])],
    2: [commit(11, 1, WHOLE), commit(12, 2, WHOLE)],
}
BROKEN = [
    event(12.25, "FailureInjected", 2, kind="SIGKILL", incarnation="2-a-0"),
    event(12.3, "RingBroken", 0, epoch=1, suspect=2),
    event(12.35, "RingBroken", 1, epoch=1, suspect=2),
    event(12.4, "ReplicaExited", 2, kind="SIGKILL", incarnation="2-a-0"),
    event(12.5, "GrantAdopted", 0),
    event(12.6, "GrantAdopted", 1),
    event(12.75, "RingConnected", 1, epoch=2),
    event(12.75, "StepRetried", 1),
]
BACK = [
    event(13.0, "ReplicaStarted", 2, incarnation="2-a-1"),
    event(14.6, "CheckedIn", 2, incarnation="2-a-1"),
]
FAILURE = failures_of(ROWS, [*BROKEN, *BACK])[KILL.incarnation]


def others(rows: dict[int, list[dict[str, Any]]] = ROWS) -> dict[int, list[dict[str, Any]]]:
    return {0: rows[0], 1: rows[1]}


def test_a_stall_is_that_of_the_last_survivor() -> None:
    found = stall(KILL, others(), 1.0)
    assert found is not None
    assert found.last == 1
    assert (found.next_s, found.less_one_s) == pytest.approx((1.35, 0.35))
    assert found.stall_s == pytest.approx(0.6)  # of a step that began at 12


def test_a_step_that_was_committed_with_the_victim_is_not_the_next_one() -> None:
    rows = {0: [*ROWS[0][:2], commit(12.3, 3, WHOLE), commit(14.3, 4, [0, 1])]}
    found = stall(KILL, rows, 1.0)
    assert found is not None
    assert (found.next_s, found.stall_s) == pytest.approx((2.05, 0.3))  # two steps in 2.3 s
    assert stall(KILL, {0: ROWS[0][:2]}, 1.0) is None


def test_phases_add_up() -> None:
    found = phases(KILL, FAILURE, 1, ROWS[1], BROKEN)
    assert found is not None
    parts = {"detect": 0.05, "quorum": 0.3, "reconnect": 0.15, "compute": 0.25, "ring": 0.5, "commit": 0.1}
    assert found == pytest.approx(parts)
    assert repeated(found) is None
    late = [*ROWS[1][:2], commit(13.6, 3, [0, 1], 1.5, 0.1)]  # forward and backward were over before the grant
    found = phases(KILL, FAILURE, 1, late, BROKEN)
    assert found is not None
    assert found["compute"] == 0
    assert repeated(found) == pytest.approx(0.15 + 0.75 + 0.1)
    assert sum(found.values()) == pytest.approx(1.35)
    assert phases(KILL, FAILURE, 1, ROWS[1], [e for e in BROKEN if e["event"] != "StepRetried"]) is None


def test_what_a_return_cost_is_waited_for_beyond_the_usual() -> None:
    rows = {n: [*each, commit(15, 5, [0, 1], 0.3, 0.1), commit(16, 6, WHOLE)] for n, each in others().items()}
    found = came_back(KILL, FAILURE, rows, 0.02)
    assert found is not None
    assert found.rejoin_s == pytest.approx(3.75)
    assert found.waited_s == pytest.approx(0.38)
    assert came_back(KILL, FAILURE, others(), 0.02) is None


def test_a_row_and_its_goals_and_tables() -> None:
    rows = {n: [*each, commit(15, 5, WHOLE)] for n, each in ROWS.items()}
    row = kill_row(RecoverySetup(replicas=3), [KILL], rows, [*BROKEN, *BACK])
    assert row["step_ms"] == 1000
    times = {"ratio": 1.01, "low": 0.99, "high": 1.03}
    spread = {"p50_ms": 50.0, "min_ms": 40.0, "max_ms": 60.0, "count": 5}
    result: dict[str, Any] = {
        "kill": [row],
        "torchft": [{"setting": "tuned", **row}],
        "stop": [row],
        "torchft_stop": [{"setting": "tuned", **row}],
        "rejoin": [{**row, "step_ms": 400.0}],
        "return": [],
        "readers": [
            {
                "replicas": 2,
                "readers": {"slow": 24, "garbage": 8, "stranger": 8},
                "steps": {"with": spread, "without": spread},
                "times": times,
            }
        ],
        "local": [
            {
                "bytes": 256 * MIB,
                "times": dict.fromkeys(("stage", "agent", "save", "file"), spread),
                "times_as_fast": 4.9,
            }
        ],
    }
    seen = {verdict.text: (verdict.seen, verdict.met) for verdict in goals.recovery(result)}
    assert seen["SIGKILL to next commit - 1 step, p50 ms"] == (350, False)
    assert seen["all of the step hit - 1 step, p99 ms"] == (600, False)
    assert seen["SIGSTOP to next commit - 1 step, p50 ms"] == (350, True)
    assert seen["SIGSTOP to next commit - 1 step, p99 ms"] == (350, True)
    assert seen["others' waits for a rejoin, steps of 1000 ms"][1]
    assert seen["others' waits for a rejoin, steps of 400 ms"][1]
    assert seen["a step beside bad readers, times, at least"] == (0.99, True)
    assert seen["from the agent vs save + load, times as fast"] == (4.9, False)
    assert len(seen) == 10
    text = shown(result, goals.recovery(result))
    assert "torchft: setting tuned" in text
    assert "reconnect" in text


def test_quantiles_are_values_that_were_seen() -> None:
    assert quantile([3, 1, 2], 0.5) == 2
    assert quantile(range(1, 201), 0.99) == 198
    assert quantile([5.0], 0.99) == 5.0


def test_bad_readers_do_what_they_are_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a server that lets in who knows the token, and then never stops sending."""
    monkeypatch.setattr(bad_readers, "BEAT_S", 0.02)
    asked: list[bytes] = []
    server = socket.create_server(("127.0.0.1", 0), backlog=64)

    def serve() -> None:
        with suppress(OSError):
            while True:
                sock, _ = server.accept()
                socks.append(sock)
                with suppress(ConnectionError):  # it may be gone already
                    if not admit(sock, "secret", Purpose.STATE):
                        sock.close()
                        continue
                    asked.append(sock.recv(4096))
                    sock.setblocking(False)
                    with suppress(BlockingIOError):
                        sock.send(b"HTTP/1.1 200 OK\r\n\r\n" + bytes(1 << 20))

    socks: list[socket.socket] = []
    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with BadReaders([f"127.0.0.1:{server.getsockname()[1]}"], "secret", lambda: "/v1/state") as readers:
        deadline = time.monotonic() + 10
        while readers.seen["beats"] < 5 or readers.seen.total() < readers.seen["beats"] + sum(READERS.values()):
            assert time.monotonic() < deadline, readers.seen
            time.sleep(0.01)
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join()
    for sock in socks:
        sock.close()
    assert readers.seen.keys() == {"beats", "slow 200", "garbage gone", "stranger gone"}
    assert readers.seen["slow 200"] == READERS["slow"]
    assert asked == [b"GET /v1/state HTTP/1.1\r\nHost: x\r\n\r\n"] * READERS["slow"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["recovery", "--measure", "bandwidth"], "--measure: got 'bandwidth'"),
        (["recovery", "--kills", "0"], "--kills: got 0"),
        (["recovery", "--rounds", "0"], "--rounds: got 0"),
        (["recovery", "--measure", "local", "--sizes", "3"], "--sizes: got '3'"),
        (["recovery", "--measure", "local", "--sizes", "4GiB,4GiB,3"], "--sizes"),
        (["overhead", "--measure", "kill"], "--measure: got 'kill'"),
        (["overhead", "--rounds", "many"], "--rounds"),
    ],
)
def test_bad_arguments_get_one_line(capsys: pytest.CaptureFixture[str], argv: list[str], said: str) -> None:
    assert main(["bench", *argv]) == 64
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert said in err


@pytest.mark.proof
@pytest.mark.multiproc
@pytest.mark.usefixtures("_nothing_left")
def test_a_replica_is_killed_and_comes_back() -> None:
    with open(os.devnull, "w") as nowhere:
        result = run(RecoveryOptions(("kill",), 1, 1, ()), nowhere, SMALL)
    (row,) = result["kill"]
    assert (row["kills"], row["replicas"]) == (1, 2)
    assert row["next"]["p50_ms"] > 0
    assert row["rejoin"]["p50_ms"] > row["next"]["p50_ms"]
    if row["phases"]:
        parts = sum(span["p50_ms"] for span in row["phases"].values())
        assert parts == pytest.approx(row["next"]["p50_ms"], abs=0.01)
    assert result["goals"]
    assert result["rejoin"] == result["readers"] == result["local"] == result["torchft"] == []
    assert result["stop"] == result["torchft_stop"] == result["return"] == []


@pytest.mark.multiproc
@pytest.mark.usefixtures("_nothing_left")
def test_a_state_comes_back_from_the_agent_and_from_a_file() -> None:
    with open(os.devnull, "w") as nowhere:
        result = run(RecoveryOptions(("local",), 1, 1, (MIB + 4,)), nowhere)
    (row,) = result["local"]
    assert row["bytes"] == MIB + 4
    assert {name: found["count"] for name, found in row["times"].items()} == {
        "stage": 1,
        "save": 1,
        "agent": 1,
        "file": 1,
    }


@pytest.mark.proof
@pytest.mark.multiproc
@pytest.mark.usefixtures("_nothing_left")
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.soak)])
def test_torchft_in_the_same_situation(number: signal.Signals) -> None:
    setting = Setting((300, 100), "quick", 10, 2.0)
    (row,) = torchft(SMALL, 1, ProgressLog(io.StringIO()), {"quick": setting}, number)
    assert (row["kills"], row["next"]["count"]) == (1, 1)
    assert row["next"]["p50_ms"] > 200  # it waits for a heartbeat that does not come


@pytest.mark.proof
@pytest.mark.multiproc
@pytest.mark.usefixtures("_nothing_left")
def test_a_replica_is_stopped_and_replaced() -> None:
    (row,) = stops(SMALL, 1, ProgressLog(io.StringIO()))
    assert (row["kills"], row["replicas"]) == (1, 2)
    assert row["next"]["p50_ms"] > 500  # of silence
    assert row["rejoin"]["p50_ms"] > row["next"]["p50_ms"]

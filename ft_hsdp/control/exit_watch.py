"""A process that outlives the ranks of a replica on one machine and tells the lighthouse that they have ended.

Under ft_hsdp's own launcher the supervisor does that; under another launcher no other process does. A replica on
several machines has one on each: while the ranks live it says so, or the lighthouse would take its machine for a
lost one after the end of the others (`lighthouse.quorum.rules.Spread`). Run as `python -m
ft_hsdp.control.exit_watch` with a `Watched` as JSON on stdin. It ends when a lighthouse knows that the incarnation
has exited, when the run's folder is removed, or when no lighthouse answers for long.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from ft_hsdp import tls
from ft_hsdp.config.network import NetworkConfig
from ft_hsdp.control.lighthouse_client import LighthouseClient
from ft_hsdp.core.host_report import MachineRanks
from ft_hsdp.errors import LighthouseUnreachable
from ft_hsdp.jsonl import open_to_append, read_object
from ft_hsdp.lifetime import unmarked
from ft_hsdp.protocol import ProcessReport

AGAIN_S = 0.5


@dataclass(frozen=True, slots=True)
class Watched:
    incarnation: str  # of the replica
    machine: str  # the name of this host
    machines: int  # on how many machines the incarnation has ranks
    pids: tuple[int, ...]  # of all its ranks here
    lighthouses: tuple[str, ...]  # their URLs
    token: str  # the job's token
    final: str  # path of its replica's final.json
    listed: str | None  # path of a run's lighthouse.json, which names newer URLs; None: there is none
    network: NetworkConfig  # for TLS
    patience_s: float  # how long a lighthouse that does not answer is tried once they have ended, in seconds
    beat_s: float  # between two reports that they live, in seconds


_WATCHED = TypeAdapter(Watched)


def process_space() -> str:
    """Return a name that is equal for two processes in which a pid means the same process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return f"{boot}:{Path('/proc/self/ns/pid').stat().st_ino}"


def shares(places: Sequence[tuple[str, str, int]], rank: int) -> tuple[int, tuple[int, ...]]:
    """Return on how many machines ranks are, and which pids the watch of ``rank`` has to watch.

    Args:
        places: Of each rank: its host's name, its `process_space` and its pid.
        rank: The rank that asks.

    Returns:
        () as pids if another rank of the host is the first; 0 and () if pids of one host mean different processes.
    """
    hosts = {host for host, _, _ in places}
    if len({(host, space) for host, space, _ in places}) != len(hosts):
        return 0, ()
    mine = [(n, pid) for n, (host, _, pid) in enumerate(places) if host == places[rank][0]]
    return len(hosts), tuple(pid for _, pid in mine) if mine[0][0] == rank else ()


def start(watched: Watched, log: Path) -> subprocess.Popen[bytes]:
    """Start the watch in a session of its own, so that a signal to the ranks does not end it.

    It outlives this process.
    """
    with open_to_append(log) as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "ft_hsdp.control.exit_watch"],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=out,
            env=unmarked(),
            start_new_session=True,
        )
    assert process.stdin is not None
    with contextlib.suppress(OSError), process.stdin as pipe:
        pipe.write(_WATCHED.dump_json(watched))
    return process


def all_gone(pids: Iterable[int]) -> None:
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            poller = select.poll()
            poller.register(descriptor, select.POLLIN)
            poller.poll()
        finally:
            os.close(descriptor)


async def report(watched: Watched) -> bool:
    """Tell a lighthouse of the ranks here until it knows that the incarnation has exited.

    Args:
        watched: the ranks, the incarnation and the lighthouses.

    Returns:
        Whether it knows. False: the ranks here have ended, and no lighthouse has answered for `patience_s`, or the
        `listed` file is gone: then the run has been removed, and its lighthouse does not come back.
    """
    listed = None if watched.listed is None else Path(watched.listed)
    client = LighthouseClient(watched.lighthouses, watched.token, tls.client(watched.network), listed)
    waiting = asyncio.create_task(asyncio.to_thread(all_gone, watched.pids))
    until = math.inf
    try:
        while True:
            await asyncio.wait([waiting], timeout=watched.beat_s if watched.machines > 1 else None)
            gone, pause_s = waiting.done(), 0.0
            if gone:
                until, pause_s = min(until, time.monotonic() + watched.patience_s), AGAIN_S
            here = MachineRanks(
                watched.incarnation, watched.machine, watched.machines, gone, gone and _is_done(watched)
            )
            try:
                if (await client.report(ProcessReport(machine=here))).exited:
                    return True
                until, pause_s = math.inf, watched.beat_s if gone else 0.0
            except LighthouseUnreachable:
                if gone and (time.monotonic() >= until or (listed is not None and not listed.exists())):
                    return False
            await asyncio.sleep(pause_s)
    finally:
        await client.close()


def _is_done(watched: Watched) -> bool:
    """Return whether the incarnation's script has stopped the job or trained to its end."""
    said = read_object(Path(watched.final))
    return bool(said.get("of_job")) and said.get("incarnation") == watched.incarnation


def main() -> int:
    watched = _WATCHED.validate_json(sys.stdin.buffer.read())
    return 0 if asyncio.run(report(watched)) else 1


if __name__ == "__main__":
    sys.exit(main())

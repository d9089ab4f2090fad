"""A process that outlives the ranks of a replica and tells the lighthouse that they have exited.

Under ft_hsdp's own launcher the supervisor does that; under another launcher no other process does. It is an exit
only when all ranks are gone, so this process is started only where all ranks run on one machine. Run as `python -m
ft_hsdp.control.exit_watch` with a `Watched` as JSON on stdin. It ends when a lighthouse knows, when the run's
folder is removed, or when its time is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from ft_hsdp import tls
from ft_hsdp.config.network import NetworkConfig
from ft_hsdp.control.lighthouse_client import LighthouseClient
from ft_hsdp.core.incarnation import IncarnationId
from ft_hsdp.errors import LighthouseUnreachable
from ft_hsdp.jsonl import open_to_append, read_object
from ft_hsdp.lifetime import unmarked
from ft_hsdp.protocol import ProcessReport

AGAIN_S = 0.5


@dataclass(frozen=True, slots=True)
class Watched:
    incarnation: str  # of the replica
    pids: tuple[int, ...]  # of all its ranks
    lighthouses: tuple[str, ...]  # their URLs
    token: str  # the job's token
    final: str  # path of its replica's final.json
    listed: str | None  # path of a run's lighthouse.json, which names newer URLs; None: there is none
    network: NetworkConfig  # for TLS
    patience_s: float  # how long a lighthouse that does not answer is tried, in seconds


_WATCHED = TypeAdapter(Watched)


def process_space() -> str:
    """Return a name that is equal for two processes in which a pid means the same process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{Path('/proc/self/ns/pid').stat().st_ino}"


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
    """Tell a lighthouse that the incarnation has exited.

    Args:
        watched: the incarnation and the lighthouses.

    Returns:
        Whether a lighthouse took the report within `patience_s`. If the `listed` file is gone, the run has been
        removed, and its lighthouse does not come back: then the report is not sent again.
    """
    listed = None if watched.listed is None else Path(watched.listed)
    client = LighthouseClient(watched.lighthouses, watched.token, tls.client(watched.network), listed)
    until = time.monotonic() + watched.patience_s
    try:
        while True:
            try:
                await client.report(ProcessReport({}, (watched.incarnation,), ended=_ended(watched)))
                return True
            except LighthouseUnreachable:
                if time.monotonic() >= until or (listed is not None and not listed.exists()):
                    return False
            await asyncio.sleep(AGAIN_S)
    finally:
        await client.close()


def _ended(watched: Watched) -> tuple[int, ...]:
    """Return the replica, if the incarnation's script has stopped the job or trained to its end; () if not."""
    said, who = read_object(Path(watched.final)), IncarnationId.parse(watched.incarnation)
    mine = said.get("of_job") and said.get("incarnation") == watched.incarnation
    return (who.replica,) if mine and who is not None else ()


def main() -> int:
    watched = _WATCHED.validate_json(sys.stdin.buffer.read())
    all_gone(watched.pids)
    return 0 if asyncio.run(report(watched)) else 1


if __name__ == "__main__":
    sys.exit(main())

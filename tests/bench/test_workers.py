"""The bench's end of its workers' lines."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack, closing
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import pytest

from ft_hsdp.bench.processes import WorkerLink, collect, spawn
from ft_hsdp.errors import Retryable


def test_answers_are_collected_in_the_order_of_the_workers(tmp_path: Path) -> None:
    with ExitStack() as stack:
        process = spawn(stack, [sys.executable, "-c", "import signal; signal.pause()"], tmp_path / "log")
        assert isinstance(process, subprocess.Popen)
        pairs = [Pipe() for _ in range(3)]
        theirs: list[Connection] = [stack.enter_context(closing(b)) for _, b in pairs]
        links = [WorkerLink(f"worker {n}", a, process, tmp_path / "log") for n, (a, _) in enumerate(pairs)]
        for link in links:
            stack.callback(link.line.close)
        for n in (2, 0):
            theirs[n].send_bytes(b'{"n": %d}' % n)
        with pytest.raises(Retryable, match=r"worker 1 did not answer within 0\.05 s"):
            collect(links, 0.05)
        for n in (2, 1, 0):
            theirs[n].send_bytes(b'{"n": %d}' % n)
        assert [answer["n"] for answer in collect(links, 5.0)] == [0, 1, 2]
        theirs[1].close()
        with pytest.raises(Retryable, match="worker 1 died"):
            collect(links, 5.0)

"""The bench's end of its workers' lines."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ft_hsdp.bench.scope import spawn
from ft_hsdp.bench.workers.link import WorkerLink, collect
from ft_hsdp.errors import Retryable
from tests.support.descriptors import raised


def test_answers_are_collected_also_where_many_files_are_open(tmp_path: Path) -> None:
    mine, theirs = zip(*(socket.socketpair() for _ in range(3)), strict=True)
    with raised(mine[1]) as high:
        links = [WorkerLink(f"worker {n}", sock, tmp_path) for n, sock in enumerate([mine[0], high, mine[2]])]
        theirs[2].sendall(b'{"n": 2}\n')
        theirs[1].sendall(b'{"n"')
        theirs[0].sendall(b'{"n": 0}\n')
        with pytest.raises(Retryable, match=r"worker 1 did not answer within 0\.05 s"):
            collect(links, 0.05)
        theirs[1].sendall(b": 1}\n")
        for n in (0, 2):
            theirs[n].sendall(b'{"n": %d}\n' % n)
        assert [answer["n"] for answer in collect(links, 5.0)] == [0, 1, 2]
        theirs[1].close()
        with pytest.raises(Retryable, match="worker 1 died"):
            collect(links, 5.0)
    for sock in (*mine, *theirs):
        sock.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_middle_of_a_start_leaves_no_process(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)
            signal.raise_signal(number)

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    started: list[Interrupted] = []
    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    before = signal.signal(signal.SIGTERM, end)
    try:
        with pytest.raises((KeyboardInterrupt, SystemExit)), ExitStack() as stack:
            spawn(stack, [sys.executable, "-c", "import signal; signal.pause()"], tmp_path / "log")
    finally:
        restored = signal.signal(signal.SIGTERM, before)
    assert restored is end
    (process,) = started
    assert process.returncode == -signal.SIGKILL

"""A donor or a receiver: `python -m ft_hsdp.bench.workers.fetch_worker FD MODULE:CLASS SEAT [WHERE]`.

    <- {"address": where, "pid": 1}      it is ready; a receiver is told where
    -> {}                                <- {"t": seconds, "base": bytes, "peak": bytes}: it has taken the state

base: resident memory before there was room for a state, peak: the most so far.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from ft_hsdp.bench.contenders.fetch import FetchSeat, ReceiverContender
from ft_hsdp.errors import EXIT_OK, EXIT_RETRYABLE, DataCorruption


def main(argv: Sequence[str]) -> int:
    """Serve until the bench closes its end."""
    sock = socket.socket(fileno=int(argv[0]))
    stream = sock.makefile("rw", encoding="utf-8")
    try:
        module, _, name = argv[1].partition(":")
        make = getattr(importlib.import_module(module), name)
        seat = FetchSeat(**json.loads(argv[2]))
        wanted = seat.digest() if argv[3:] else ""
        base = _memory("VmRSS")
        way = make(seat, *argv[3:])
        _say(stream, {"address": getattr(way, "where", ""), "pid": os.getpid()})
        while stream.readline():
            assert isinstance(way, ReceiverContender)
            start = time.perf_counter()
            way.take()
            took = time.perf_counter() - start
            peak = _memory("VmHWM")
            if way.drop() != wanted:
                raise DataCorruption("what was received is not what was sent")
            _say(stream, {"t": took, "base": base, "peak": peak})
    except Exception as error:  # whatever it is, the bench gets it as one line and the log as a traceback
        traceback.print_exc()
        with contextlib.suppress(OSError):
            _say(stream, {"error": " ".join(f"{type(error).__name__}: {error}".split())})
        sys.stderr.flush()
        os._exit(EXIT_RETRYABLE)
    os._exit(EXIT_OK)  # servers have threads that nobody needs to wait for


def _say(stream: object, answer: dict[str, object]) -> None:
    stream.write(json.dumps(answer) + "\n")  # type: ignore[attr-defined]
    stream.flush()  # type: ignore[attr-defined]


def _memory(what: str) -> int:
    """Resident memory of this process in bytes, now (VmRSS) or at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{what}:"))


if __name__ == "__main__":
    main(sys.argv[1:])

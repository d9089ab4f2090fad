"""The process from which workers are forked: it has imported torch, and has one thread and no process group.

`python -m ft_hsdp.bench.workers.nursery FD MODULE...` imports the modules. It serves one client over socket FD,
a message for each fork:

    <- {"ready": true} or {"error": "one line"}
    -> {"entry": "module:class", "seat": {}}, with the worker's socket and its log    <- {}, with its pidfd

It ends when its client does, and its workers with it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import socket
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from ft_hsdp.bench.contenders.base import AllReduceRank, WorkerSeat
from ft_hsdp.errors import EXIT_OK, EXIT_RETRYABLE
from ft_hsdp.launch.backend.processes import die_with

LARGEST = 1 << 16  # bytes of one message


def main(argv: Sequence[str]) -> int:
    """Load, then fork on request."""
    sock = socket.socket(fileno=int(argv[0]))
    try:
        for name in ("ft_hsdp.bench.workers.worker", *argv[1:]):
            importlib.import_module(name)
        if (threads := len(os.listdir("/proc/self/task"))) != 1:
            raise RuntimeError(f"the imports left {threads} threads running; a fork of them would hang")
    except Exception as error:  # it is the bench that has to say it
        sock.send(json.dumps({"error": " ".join(f"{type(error).__name__}: {error}".split())}).encode())
        return EXIT_RETRYABLE
    gc.collect()
    gc.freeze()  # the workers share these pages for as long as nobody writes to them
    sock.send(b'{"ready": true}')
    children: list[int] = []
    with contextlib.suppress(ConnectionError):
        while True:
            message, fds, _, _ = socket.recv_fds(sock, LARGEST, 2)
            if not message:
                break
            children = [pid for pid in children if os.waitpid(pid, os.WNOHANG)[0] == 0]
            children.append(_fork(sock, message, fds))
    for pid in children:
        os.waitpid(pid, 0)  # the bench kills them before it hangs up
    return EXIT_OK


def _fork(sock: socket.socket, message: bytes, fds: Sequence[int]) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _become(sock, message, fds, parent)
    pidfd = os.pidfd_open(pid)  # not reaped yet, so it is this child
    socket.send_fds(sock, [b"{}"], [pidfd])
    for fd in (pidfd, *fds):
        os.close(fd)
    return pid


def _become(sock: socket.socket, message: bytes, fds: Sequence[int], parent: int) -> NoReturn:
    """In the child: shed what belongs to the nursery, serve the bench, exit."""
    code = EXIT_RETRYABLE
    try:
        die_with(parent)
        os.close(sock.detach())
        link, log = fds
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        request = json.loads(message)
        module, _, name = request["entry"].partition(":")
        make: Callable[[WorkerSeat], AllReduceRank] = getattr(importlib.import_module(module), name)
        from ft_hsdp.bench.workers.worker import serve  # the nursery has loaded it; here it is only named

        code = serve(socket.socket(fileno=link), make, WorkerSeat(**request["seat"]))
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

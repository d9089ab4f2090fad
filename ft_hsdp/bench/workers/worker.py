"""A member of an all-reduce, and the process from which members are forked.

`python -m ft_hsdp.bench.workers.worker FD MODULE...` imports torch and the modules, which takes seconds, and then
forks a worker for each {"entry": "module:class", "spec": {...}} that comes over socket FD, with descriptors of the
worker's socket and log. Its workers die with it. A worker knows these commands:

    -> {"do": "join", "epoch": 1, "ring": [[0, ""]], "at": 12.5}   <- {"t": 12.6}
    -> {"do": "prepare", "bytes": 4096}               <- {}
    -> {"do": "check"}                                <- {"wrong": ""}
    -> {"do": "run", "times": 1, "at": 12.5}          <- {"t": 12.6}
    -> {"do": "retry", "epoch": 2, "ring": []}        <- {"t": 12.6}         join, and all-reduce once

Times are of CLOCK_MONOTONIC, which all processes of a machine share; `at` is when to start. An all-reduce or a
join that fails in a way that FTAR can recover from is answered {"raised": "PeerDead", "text": "", "t": 12.6}.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from ft_hsdp.bench.contenders.base import AllReduceRank, WorkerSpec
from ft_hsdp.bench.workers.link import Answer, Obey, serve
from ft_hsdp.errors import EXIT_RETRYABLE, RecoverableError
from ft_hsdp.lifetime import die_with

PERIOD = 251  # of the values in the input: a prime, so that a shifted shard is seen
FIRST_TO_GO = "800"  # where memory runs out the kernel takes a worker, not what else runs on the machine
LARGEST = 1 << 16  # bytes of an order to fork
BLOCK = 1 << 20  # elements that are filled or checked at a time


def serve_rank(sock: socket.socket, make: Callable[[WorkerSpec], AllReduceRank], spec: WorkerSpec) -> int:
    """Serve the bench as one rank; return the exit code."""
    torch.set_num_threads(1)
    Path("/proc/self/oom_score_adj").write_text(FIRST_TO_GO)

    def set_up() -> tuple[Answer, Obey]:
        worker = Worker(make(spec), spec.member)
        return {"address": worker.rank.address, "member": spec.member}, worker.obey

    return serve(sock, set_up)


class Worker:
    """Carries out commands for one rank."""

    def __init__(self, rank: AllReduceRank, member: int) -> None:
        self.rank = rank
        self._member = member
        self._position = 0
        self._members = 1
        self._source = self._sink = torch.empty(0)

    def obey(self, command: Mapping[str, Any]) -> Answer:
        """Do one thing; return the answer."""
        try:
            match command["do"]:
                case "join":
                    _wait_until(command["at"])
                    self._join(command["epoch"], command["ring"])
                case "run":
                    _wait_until(command["at"])
                    for _ in range(command["times"]):
                        self.rank.all_reduce(self._source, self._sink)
                case "retry":
                    self._join(command["epoch"], command["ring"])
                    self.rank.all_reduce(self._source, self._sink)
                case "prepare":
                    return self._prepare(command["bytes"] // 4)
                case "check":
                    return {"wrong": self._check()}
        except RecoverableError as error:
            return {"raised": type(error).__name__, "text": str(error), "t": time.monotonic()}
        return {"t": time.monotonic()}

    def _join(self, epoch: int, ring: Sequence[tuple[int, str]]) -> None:
        self.rank.join(epoch, [(member, address) for member, address in ring])
        self._position = [member for member, _ in ring].index(self._member)
        self._members = len(ring)

    def _prepare(self, elements: int) -> Answer:
        self._source = self._sink = torch.empty(0)  # give the old memory back first
        self._source = self.rank.empty(elements)
        self._sink = self._source if self.rank.in_place else self.rank.empty(elements)
        self._source.zero_()  # touch every page now
        self._sink.zero_()
        return {}

    def _check(self) -> str:
        """Sum known values once; return "" or what is wrong with the sum."""
        for part, pattern in _blocks(self._source):
            torch.add(pattern, self._position, out=part)
        self.rank.all_reduce(self._source, self._sink)
        wrong = ""
        for number, (part, pattern) in enumerate(_blocks(self._sink)):
            right = pattern * self._members + self._members * (self._members - 1) / 2
            if not torch.equal(part, right):
                first = int((part != right).nonzero()[0])
                got, wanted = float(part[first]), float(right[first])
                wrong = f"element {number * BLOCK + first} is {got:g}, not {wanted:g}"
                break
        if self.rank.in_place:
            self._source.zero_()  # sums of sums would grow beyond all bounds; zeros stay what they are
        return wrong


def _blocks(tensor: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the tensor in blocks of at most BLOCK elements, each with the values that member 0 puts there."""
    index = torch.arange(min(BLOCK, tensor.numel()))
    for number, part in enumerate(tensor.split(BLOCK)):
        yield part, ((index[: part.numel()] + number * BLOCK) % PERIOD).float()


def _wait_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def main(fd: int, modules: Sequence[str]) -> None:
    """Import the modules, then fork a worker for each order until the bench closes its end."""
    sock = socket.socket(fileno=fd)
    for name in modules:
        importlib.import_module(name)
    if (threads := len(os.listdir("/proc/self/task"))) != 1:
        raise RuntimeError(f"the imports left {threads} threads running; a fork of them would hang")
    gc.collect()
    gc.freeze()  # the workers share these pages for as long as none of them writes to one
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the workers
    sock.sendall(json.dumps({"address": "", "pid": os.getpid()}).encode() + b"\n")
    with contextlib.suppress(ConnectionError):
        while True:
            message, fds, _, _ = socket.recv_fds(sock, LARGEST, 2)
            if not message:
                return
            parent = os.getpid()
            if os.fork() == 0:
                _become(sock, message, fds, parent)
            for each in fds:
                os.close(each)
            sock.sendall(b"{}\n")


def _become(sock: socket.socket, message: bytes, fds: Sequence[int], parent: int) -> NoReturn:
    """In the child: shed what belongs to the parent, serve the bench, exit."""
    code = EXIT_RETRYABLE
    try:
        die_with(parent)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        sock.close()
        link, log = fds
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        order = json.loads(message)
        module, _, name = order["entry"].partition(":")
        make: Callable[[WorkerSpec], AllReduceRank] = getattr(importlib.import_module(module), name)
        code = serve_rank(socket.socket(fileno=link), make, WorkerSpec(**order["spec"]))
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])

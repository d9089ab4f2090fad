"""A worker process: does what the bench says over a socket, one JSON line for each command and each answer.

    <- {"address": "", "member": 0, "pid": 1}          once, when it is set up
    -> {"do": "join", "epoch": 1, "ring": [[0, ""]], "at": 12.5}   <- {"t": 12.6}
    -> {"do": "prepare", "bytes": 4096}               <- {}
    -> {"do": "check"}                                <- {"wrong": ""}
    -> {"do": "run", "times": 1, "at": 12.5}          <- {"t": 12.6}
    -> {"do": "retry", "epoch": 2, "ring": []}        <- {"t": 12.6}         join, and all-reduce once
    -> {"do": "spin", "on": true}                     <- {}                  a thread of pure Python

Times are of CLOCK_MONOTONIC, which all processes of a machine share; `at` is when to start. An all-reduce or a
join that fails in a way that FTAR can recover from is answered {"raised": "PeerDead", "text": "", "t": 12.6}; any
other error is answered {"error": "one line"} and ends the worker.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ft_hsdp.bench.contenders.base import AllReduceRank, WorkerSeat
from ft_hsdp.errors import EXIT_OK, EXIT_RETRYABLE, RecoverableError

PERIOD = 251  # of the values in the input: a prime, so that a shifted shard is seen
FIRST_TO_GO = "800"  # where memory runs out the kernel takes a worker, not what else runs on the machine
BLOCK = 1 << 20  # elements that are filled or checked at a time


def serve(sock: socket.socket, make: Callable[[WorkerSeat], AllReduceRank], seat: WorkerSeat) -> int:
    """Set up, then obey until the bench closes its end; the exit code."""
    torch.set_num_threads(1)
    Path("/proc/self/oom_score_adj").write_text(FIRST_TO_GO)
    with sock, sock.makefile("rw", encoding="utf-8") as stream:

        def say(answer: Mapping[str, Any]) -> None:
            stream.write(json.dumps(answer) + "\n")
            stream.flush()

        try:
            worker = Worker(make(seat), seat.member)
            say({"address": worker.rank.address, "member": seat.member, "pid": os.getpid()})
            for line in stream:
                say(worker.obey(json.loads(line)))
            worker.close()
        except Exception as error:  # whatever it is, the bench gets it as one line and the log as a traceback
            traceback.print_exc()
            with contextlib.suppress(OSError):
                say({"error": " ".join(f"{type(error).__name__}: {error}".split())})
            return EXIT_RETRYABLE
    return EXIT_OK


class Worker:
    """Carries out commands for one rank."""

    def __init__(self, rank: AllReduceRank, member: int) -> None:
        self.rank = rank
        self._member = member
        self._position = 0
        self._members = 1
        self._source = self._sink = torch.empty(0)
        self._spinner: Spinner | None = None

    def obey(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Do one thing; the answer."""
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
                case "spin":
                    return self._spin(command["on"])
        except RecoverableError as error:
            return {"raised": type(error).__name__, "text": str(error), "t": time.monotonic()}
        return {"t": time.monotonic()}

    def close(self) -> None:
        """End the thread and the rank."""
        self._spin(False)
        self.rank.close()

    def _join(self, epoch: int, ring: Sequence[tuple[int, str]]) -> None:
        self.rank.join(epoch, [(member, address) for member, address in ring])
        self._position = [member for member, _ in ring].index(self._member)
        self._members = len(ring)

    def _prepare(self, elements: int) -> dict[str, Any]:
        self._source = self._sink = torch.empty(0)  # give the old memory back first
        self._source = self.rank.empty(elements)
        self._sink = self._source if self.rank.in_place else self.rank.empty(elements)
        self._source.zero_()  # touch every page now
        self._sink.zero_()
        return {}

    def _check(self) -> str:
        """Sum known values once; "" or what is wrong with the sum."""
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

    def _spin(self, on: bool) -> dict[str, Any]:
        if on and self._spinner is None:
            self._spinner = Spinner()
        elif not on and self._spinner is not None:
            self._spinner.stop()
            self._spinner = None
        return {}


class Spinner:
    """A thread of pure Python that gives up the interpreter only when it is made to."""

    def __init__(self) -> None:
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="bench-spinner", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and wait for it."""
        self._stopped = True
        self._thread.join()

    def _run(self) -> None:
        turns = 0
        while not self._stopped:
            turns += 1


def _blocks(tensor: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The tensor in blocks of at most BLOCK elements, each with the values that member 0 puts there."""
    index = torch.arange(min(BLOCK, tensor.numel()))
    for number, part in enumerate(tensor.split(BLOCK)):
        yield part, ((index[: part.numel()] + number * BLOCK) % PERIOD).float()


def _wait_until(moment: float) -> None:
    wait = moment - time.monotonic()
    if wait > 0:
        time.sleep(wait)

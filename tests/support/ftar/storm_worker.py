"""A light member of the storm: it obeys commands (the methods of `Worker`), and says what came of them."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import random
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from ft_hsdp.errors import RecoverableError
from ft_hsdp.ftar import Communicator, Settings
from ft_hsdp.ftar.executor import Work
from tests.support.descriptors import warm_libuv

DTYPES = (torch.float32, torch.bfloat16, torch.int64)
MOST = 1 << 20  # elements of the largest message
SHIFTS = 64
GOING = 3  # sums after which a ring is said to be going
PAUSE_S = 0.005
LATE_S = 20.0  # longest time of an all-reduce that ends well or badly
SETTLE_S = 3.0  # longest time for threads and descriptors to go

NUMBERS = torch.randint(0, 8, (MOST + SHIFTS,), generator=torch.Generator().manual_seed(1))
TABLES = {dtype: NUMBERS.to(dtype) for dtype in DTYPES}  # sums of eight stay exact in bf16


def given(member: int, index: int, size: int, dtype: torch.dtype) -> Tensor:
    """What ``member`` puts into all-reduce ``index`` of an epoch."""
    shift = (member * 5 + index) % SHIFTS
    return TABLES[dtype][shift : shift + size]


class Script:
    """What the members of a ring do in an epoch: the same for all, drawn from the epoch's seed."""

    def __init__(self, seed: str, members: Sequence[int]) -> None:
        self._chance = random.Random(seed)
        self._members = members

    def next(self) -> tuple[int, torch.dtype, list[int]]:
        """Size, type and contributors of the next all-reduce."""
        chance = self._chance
        size = chance.choice((1, chance.randint(0, 100), chance.randint(1, 1 << 14), chance.randint(1, 1 << 18)))
        if chance.random() < 0.05:
            size = MOST
        some = [m for m in self._members if chance.random() < 0.75]
        return size, chance.choice(DTYPES), some if chance.random() < 0.3 else list(self._members)


class Task:
    """One all-reduce of this member, and what must come of it."""

    def __init__(self, worker: Worker, index: int, drawn: tuple[int, torch.dtype, list[int]]) -> None:
        self.index = index
        size, dtype, givers = drawn
        self._chance = worker.chance
        self._mine = given(worker.member, index, size, dtype)
        self._total = sum((given(m, index, size, dtype) for m in givers), torch.zeros(size, dtype=dtype))
        self._gives = worker.member in givers
        self._kept = self._chance.random() < 0.7
        self._tensor = self._memory(worker.comm, size, dtype)
        if self._gives:
            self._tensor.copy_(self._mine)
        elif dtype.is_floating_point:
            self._tensor.fill_(float("nan"))
        out = self._memory(worker.comm, size, dtype) if self._kept and self._chance.random() < 0.5 else None
        self.work: Work = worker.comm.all_reduce(
            self._tensor, out=out, contribute=self._gives, preserve_input=self._kept
        )

    def _memory(self, comm: Communicator, size: int, dtype: torch.dtype) -> Tensor:
        return comm.empty(size, dtype) if self._chance.random() < 0.5 else torch.empty(size, dtype=dtype)

    def wrong(self) -> str:
        """What is not as it must be, now that the work has ended."""
        if self._kept and self._gives and not torch.equal(self._tensor, self._mine):
            return f"the input of all-reduce {self.index} was written"
        if self.work.status == "SUCCESS" and not torch.equal(self.work.wait(0), self._total):
            return f"all-reduce {self.index} has a wrong sum"
        return ""


class Worker:
    """One member: commands come in on ``pipe``, what happens goes out."""

    def __init__(self, pipe: Connection, member: int) -> None:
        self._pipe = pipe
        self._telling = threading.Lock()
        self.member = member
        self.chance = random.Random(os.getpid())
        self.comm: Communicator
        self._open = False
        self._epoch = 0
        self._going = 0
        self._submit = threading.Lock()
        self._rings: list[threading.Thread] = []

    def say(self, **message: Any) -> None:
        """Tell the driver; if it is gone there is nobody to tell."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError), self._telling:
            self._pipe.send({"t": time.monotonic(), **message})

    def serve(self) -> None:
        """Obey until the driver hangs up."""
        while True:
            command = self._pipe.recv()
            getattr(self, command.pop("do"))(**command)

    # The commands.

    def open(self, settings: dict[str, Any], token: str) -> None:
        warm_libuv()
        self._before = held()
        self.comm = Communicator(self.member, token=token, settings=Settings(**settings))
        self._epoch, self._open = 0, True
        self.say(opened=self.comm.address)

    def ring(self, epoch: int, members: list[tuple[int, str]], ops: int, seed: str) -> None:
        """Form a ring, whatever goes on in the one before, and sum on it: ``ops`` times, or until it breaks."""
        with self._submit:
            self._epoch = epoch
        self._rings = [t for t in self._rings if t.is_alive()]
        thread = threading.Thread(target=self._run, args=(epoch, members, ops, seed), name=f"ring-{epoch}")
        self._rings.append(thread)
        thread.start()

    def ping(self) -> None:
        """Say how far the ring has come."""
        self.say(pong=self._going, state=self.comm.state.name)

    def abort(self) -> None:
        self.comm.abort("the storm says so")

    def close(self) -> None:
        """Leave; then nothing of it may be left."""
        with self._submit:
            self._epoch = 0
            self._open = False
        self.comm.close()
        for thread in self._rings:
            thread.join(LATE_S)
        self._rings.clear()
        del self.comm
        self.say(closed=self._left_over())

    def _left_over(self) -> str:
        end = time.monotonic() + SETTLE_S
        while True:
            gc.collect()
            now = held()
            more = {name: now[name] - self._before[name] for name in now if now[name] - self._before[name]}
            if not more or time.monotonic() > end:
                return "; ".join(f"{len(what)} {name}: {sorted(what.elements())}" for name, what in more.items())
            time.sleep(0.01)

    # The ring's thread.

    def _run(self, epoch: int, members: list[tuple[int, str]], ops: int, seed: str) -> None:
        try:
            start = time.monotonic()
            self.comm.reconfigure(epoch, members)
        except RecoverableError as error:
            self.say(ended=epoch, why=type(error).__name__, text=str(error), suspect=error.suspect, formed=False)
            return
        except Exception as error:
            self.say(problem=f"epoch {epoch}: reconfigure raised {error!r}")
            self.say(ended=epoch, why=type(error).__name__, text=str(error), suspect=None, formed=False)
            return
        self.say(formed=epoch, took=time.monotonic() - start, transports=self.comm.transports)
        try:
            self._sum(epoch, Script(f"{seed}:{epoch}", [m for m, _ in members]), ops)
        except Exception as error:
            self.say(problem=f"epoch {epoch}: {error!r}")
            raise

    def _sum(self, epoch: int, script: Script, ops: int) -> None:
        done: Counter[str] = Counter()
        pending: deque[Task] = deque()
        error: BaseException | None = None
        index, asked = 0, True
        while pending or (asked and index < ops):
            while asked and index < ops and len(pending) <= self.chance.randint(0, 2):
                asked = self._ask(epoch, pending, index, script)
                index += asked
            if not pending:
                break
            if self.chance.random() < 0.3:  # a ring is idle at times
                time.sleep(self.chance.uniform(0.0, PAUSE_S))
            task = pending.popleft()
            failed = self._outcome(epoch, task)
            done[task.work.status] += 1
            self._going = done["SUCCESS"]
            if failed is not None and error is None:
                error, asked = failed, False
            if done.total() == done["SUCCESS"] == GOING:
                self.say(going=epoch)
        if error is None and index == ops:
            self.say(done=epoch)
        else:
            why, suspect = type(error).__name__, getattr(error, "suspect", None)
            self.say(ended=epoch, why=why, text=str(error), suspect=suspect, formed=True, counts=done)

    def _ask(self, epoch: int, pending: deque[Task], index: int, script: Script) -> bool:
        with self._submit:
            if self._epoch == epoch:
                pending.append(Task(self, index, script.next()))
                return True
        return False

    def _outcome(self, epoch: int, task: Task) -> BaseException | None:
        try:
            error = task.work.exception(LATE_S)
        except TimeoutError:
            faulthandler.dump_traceback(all_threads=True)
            self.say(problem=f"epoch {epoch}: all-reduce {task.index} hangs")
            os._exit(1)
        if wrong := task.wrong():
            self.say(problem=f"epoch {epoch}: {wrong}")
        if error is not None and not isinstance(error, RecoverableError):
            self.say(problem=f"epoch {epoch}: all-reduce {task.index} ended with {error!r}")
        return error


def held() -> dict[str, Counter[str]]:
    """Descriptors, threads and mapped segments of this process."""
    files: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            files[os.readlink(f"/proc/self/fd/{fd}").partition(":[")[0]] += 1
    files[f"/proc/{os.getpid()}/fd"] = 0
    with open("/proc/self/maps") as maps:
        segments = Counter("memfd:ftar" for line in maps if "memfd:ftar" in line)
    threads = Counter(t.name for t in threading.enumerate() if t is not threading.current_thread())
    tasks = Counter({"task": len(os.listdir("/proc/self/task"))})
    return {"descriptors": files, "segments": segments, "threads": threads, "tasks": tasks}


def member(pipe: Connection, number: int, log: str) -> None:
    """Be a member in a fork; what it writes goes to ``log``, and so do its stacks at SIGUSR1."""
    with open(log, "ab") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    with contextlib.suppress(EOFError):  # the driver has hung up
        Worker(pipe, number).serve()
    sys.stderr.flush()
    os._exit(0)

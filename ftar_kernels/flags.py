"""The page of pinned host memory by which the CPU and a kernel talk.

Each word has one writer and only grows while an all-reduce runs: the CPU posts commands, each program of the
kernel reports how many it has finished. Words of different writers are on different cache lines. The commands
follow the words: a ring of `depth` entries. The host side relies on x86-64, where stores become visible in order.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from ft_hsdp.core.ring import OperationKind

LINE = 32  # 4-byte words of a line: 128 bytes, two cache lines, which the hardware may fetch as a pair
FIELDS = 8  # 8-byte words of a command: mode, base, shift, end, recv, send, two unused
ABORT = 0  # the line of the abort word; the posts of all programs follow, then what they have done
MOST = 2**31 - 1  # posted by an abort: a program that this value wakes finds the abort word set

BEAT = 1  # word behind the abort word: the engine advances it while an all-reduce runs
STATUS = 1  # word behind a program's count of finished commands: its `Status`

# What a command reads and what it writes: bits of its mode. persistent.py repeats them as compile-time constants.
FROM_RECV = 1
FROM_LOCAL = 2
TO_SEND = 4
TO_OUT = 8


@dataclass(frozen=True, slots=True)
class Command:
    """One chunk for the device: what operation `kind` does with elements [start, stop) of the message."""

    kind: OperationKind
    start: int
    stop: int
    recv: int | None = None  # the chunk's first element in the receive buffer; None: nothing was received
    send: int | None = None  # the chunk's first element in the send buffer; None: nothing is sent

    def mode(self, contributes: bool) -> int:
        """Return which buffers the device reads and writes, as FROM_ and TO_ bits; 0 if there is nothing to do.

        A member that does not contribute relays. A final sum to which no member has contributed is zeros.
        """
        mode = FROM_RECV if self.recv is not None else 0
        if contributes and (self.kind.adds or self.recv is None):
            mode |= FROM_LOCAL
        if self.kind.stores:
            mode |= TO_OUT
        elif not mode:
            return 0
        if self.kind.sends and self.send is not None:
            mode |= TO_SEND
        return mode


class Status(IntEnum):
    """The state of a program of a kernel."""

    QUEUED = 0  # the device has not begun it: its stream still works on, or waits for, what was enqueued before
    DONE = 1
    ABORTED = 2
    EXPIRED = 3  # it ended by itself, because the engine was silent
    RUNNING = 4


class FlagPage:
    """The page of one plane.

    The engine's thread alone posts; `abort` may come from any thread, any number of times.

    Args:
        memory: flat uint8 tensor of `nbytes(programs, depth)` bytes, aligned to 128 bytes; pinned if a GPU reads
            it.
        programs: number of programs of the kernel.
        depth: how many commands may be posted and not finished; a power of two.

    Raises:
        ValueError: `depth` is not a power of two.
    """

    def __init__(self, memory: Tensor, programs: int, depth: int) -> None:
        if depth < 1 or depth & (depth - 1):
            raise ValueError(f"the number of commands at once must be a power of two, not {depth}")
        self.programs = programs
        self.depth = depth
        self.posted = 0
        words = LINE * (1 + 2 * programs)
        self.words = memory[: 4 * words].view(torch.int32)
        self.commands = memory[4 * words : self.nbytes(programs, depth)].view(torch.int64)
        self._words = (ctypes.c_int32 * words).from_address(self.words.data_ptr())
        self._commands = (ctypes.c_int64 * (FIELDS * depth)).from_address(self.commands.data_ptr())
        self.reset()

    @staticmethod
    def nbytes(programs: int, depth: int) -> int:
        return 4 * LINE * (1 + 2 * programs) + 8 * FIELDS * depth

    @staticmethod
    def post_line(program: int) -> int:
        """Return the number of the line that the CPU writes for `program`."""
        return 1 + program

    def done_line(self, program: int) -> int:
        """Return the number of the line that `program` writes."""
        return 1 + self.programs + program

    def reset(self) -> None:
        """Set all words to 0. Only before a kernel starts, or after the last one has ended."""
        ctypes.memset(self._words, 0, ctypes.sizeof(self._words))
        self.posted = 0

    def post(self, command: Command, contributes: bool, vector: int) -> None:
        """Post the next command to all programs. Does not wait.

        Args:
            command: what to do with one chunk.
            contributes: whether this member adds its local gradient.
            vector: number of elements in one access of 16 bytes.

        Raises:
            ValueError: the places of the command do not begin alike within 16 bytes.
            BufferError: `depth` commands are posted and not finished.
        """
        if self.posted - self.done() >= self.depth:
            raise BufferError(f"{self.depth} commands are posted already")
        shift = command.start % vector
        for name, place in (("recv", command.recv), ("send", command.send)):
            if place is not None and place % vector != shift:
                raise ValueError(f"{name} {place} and the chunk's start {command.start} differ modulo {vector}")
        first = FIELDS * (self.posted % self.depth)
        entry = self._commands
        entry[first] = command.mode(contributes)
        entry[first + 1] = command.start - shift
        entry[first + 2] = shift
        entry[first + 3] = shift + command.stop - command.start
        entry[first + 4] = (command.recv or shift) - shift
        entry[first + 5] = (command.send or shift) - shift
        self.posted += 1
        for program in range(self.programs):
            self._words[LINE * self.post_line(program)] = self.posted
        if self.aborted:  # an abort that came between two of these stores must not be hidden
            self.abort()

    def done(self) -> int:
        """Return how many commands all programs have finished."""
        return min(self._words[LINE * self.done_line(program)] for program in range(self.programs))

    def status(self, program: int) -> Status:
        return Status(self._words[LINE * self.done_line(program) + STATUS])

    def beat(self) -> None:
        """Tell the programs that the engine lives. The engine's thread calls it again and again; does not wait."""
        self._words[BEAT] = (self._words[BEAT] + 1) & MOST

    @property
    def aborted(self) -> bool:
        return self._words[ABORT] != 0

    def abort(self) -> None:
        """Set the abort word, then wake all programs that wait. Any thread."""
        self._words[ABORT] = 1
        for program in range(self.programs):
            self._words[LINE * self.post_line(program)] = MOST


def host_buffer(nbytes: int, device: torch.device) -> Tensor:
    """Return `nbytes` zeroed bytes of host memory, aligned to 128; pinned if `device` is a GPU."""
    if device.type == "cuda":
        return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
    memory = torch.zeros(nbytes + 128, dtype=torch.uint8)
    skip = -memory.data_ptr() % 128
    return memory[skip : skip + nbytes]

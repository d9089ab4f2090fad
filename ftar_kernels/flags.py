"""Flags: how the CPU and a kernel talk over one page of pinned host memory.

Every word has a single writer and only grows while an operation runs: the CPU posts commands, each program
reports how many it has finished. Words of different writers lie on cache lines of their own. The commands
themselves lie behind the words, ``depth`` of them, used again in turn. The host side relies on x86-64, where
stores become visible in order.
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
MOST = 2**31 - 1  # woken by this, a waiter finds the abort word set

# What a program leaves behind its count of finished commands when it ends.
STATUS = 1

# What a command reads and what it writes: bits of its mode. persistent.py repeats them as compile-time constants.
FROM_RECV = 1
FROM_LOCAL = 2
TO_SEND = 4
TO_OUT = 8


@dataclass(frozen=True, slots=True)
class Command:
    """One chunk for the device: what operation ``kind`` does with elements [start, stop) of the message."""

    kind: OperationKind
    start: int
    stop: int
    recv: int | None = None  # the chunk's first element in the receive buffer; None: nothing was received
    send: int | None = None  # the chunk's first element in the send buffer; None: nothing is sent

    def mode(self, contributes: bool) -> int:
        """Return what the device reads and writes, as FROM_ and TO_ bits; 0 if there is nothing to do.

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
    """How a program stands."""

    RUNNING = 0
    DONE = 1
    ABORTED = 2
    TIMED_OUT = 3


class FlagPage:
    """The page of one plane: ``programs`` of a kernel, room for ``depth`` commands at once.

    ``memory`` is a flat uint8 tensor of ``nbytes(programs, depth)``, aligned to 128 bytes, pinned if a GPU is to
    see it. The engine's thread is the only one that posts; ``abort`` may come from any thread, any number of
    times.
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
        """Bytes of a page."""
        return 4 * LINE * (1 + 2 * programs) + 8 * FIELDS * depth

    @staticmethod
    def post_line(program: int) -> int:
        """The line that the CPU writes for ``program``."""
        return 1 + program

    def done_line(self, program: int) -> int:
        """The line that ``program`` writes."""
        return 1 + self.programs + program

    def address(self, line: int, word: int = 0) -> int:
        """Where a word is, as a stream operation wants to know it."""
        return self.words.data_ptr() + 4 * (LINE * line + word)

    def reset(self) -> None:
        """All words to 0, before a kernel starts and after the last one has ended."""
        ctypes.memset(self._words, 0, ctypes.sizeof(self._words))
        self.posted = 0

    def post(self, command: Command, contributes: bool, vector: int) -> None:
        """Give the next command to all programs. ``vector`` is how many elements one access of 16 bytes has.

        Raises:
            ValueError: the command's places do not begin alike within 16 bytes.
            BufferError: ``depth`` commands are not finished yet.
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
        """Commands that all programs have finished."""
        return min(self._words[LINE * self.done_line(program)] for program in range(self.programs))

    def status(self, program: int) -> Status:
        """How ``program`` stands."""
        return Status(self._words[LINE * self.done_line(program) + STATUS])

    @property
    def aborted(self) -> bool:
        """Whether the abort word is set."""
        return self._words[ABORT] != 0

    def abort(self) -> None:
        """Set the abort word, then wake everybody who waits."""
        self._words[ABORT] = 1
        for program in range(self.programs):
            self._words[LINE * self.post_line(program)] = MOST

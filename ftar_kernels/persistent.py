"""One kernel for a whole all-reduce (FT-HSDP §4.2): it executes the CPU's commands in turn until all are done.

Two programs of 512 threads each take a part of every chunk. A wait ends with a command, with the abort word, or
because the engine has been silent; the program writes the reason into its status word. The CPU decides about
failures. The silence is for an engine that cannot: its process is stopped, or a call of it waits for the device.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ftar_kernels.handshake import post, wait
from ftar_kernels.reduce_copy import chunk

# Globals that a kernel reads must be compile-time constants; flags.py explains their values.
_LINE = tl.constexpr(32)
_FIELDS = tl.constexpr(8)
_DONE = tl.constexpr(1)
_RUNNING = tl.constexpr(4)
_RECV = tl.constexpr(1)
_LOCAL = tl.constexpr(2)
_SEND = tl.constexpr(4)
_OUT = tl.constexpr(8)


@triton.jit
def _to_targets(
    a: tl.tensor,
    send: tl.tensor,
    out: tl.tensor,
    some: tl.tensor,
    targets: tl.tensor,
    shift: tl.tensor,
    end: tl.tensor,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    EDGE: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Write a to where a command wants it; `send` and `out` have different types."""
    if targets == (_SEND | _OUT):
        chunk(a, a, send, out, send, some, shift, end, False, True, VECTOR, BLOCK, EDGE, STAGES)
    elif targets == _SEND:
        chunk(a, a, send, send, send, some, shift, end, False, False, VECTOR, BLOCK, EDGE, STAGES)
    elif targets == _OUT:
        chunk(a, a, out, out, send, some, shift, end, False, False, VECTOR, BLOCK, EDGE, STAGES)


@triton.jit
def execute(
    local: tl.tensor,
    out: tl.tensor,
    send: tl.tensor,
    recv: tl.tensor,
    entry: tl.tensor,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    EDGE: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Process this program's part of the command at `entry`.

    Values travel in the type of `send` and `recv`. If it is that of `local` and `out`, pointers can be chosen;
    otherwise there is code for each choice.
    """
    mode = tl.load(entry, volatile=True)
    base = tl.load(entry + 1, volatile=True) // VECTOR * VECTOR
    shift = tl.load(entry + 2, volatile=True).to(tl.int32)
    end = tl.load(entry + 3, volatile=True).to(tl.int32)
    recv += tl.load(entry + 4, volatile=True) // VECTOR * VECTOR
    send += tl.load(entry + 5, volatile=True) // VECTOR * VECTOR
    local += base
    out += base
    sources = mode & (_RECV | _LOCAL)
    targets = mode & (_SEND | _OUT)
    if local.dtype != recv.dtype:
        if sources == (_RECV | _LOCAL):  # a sum that is only stored is there already, in the buffer
            if targets == (_SEND | _OUT):
                chunk(recv, local, send, out, send, True, shift, end, True, True, VECTOR, BLOCK, EDGE, STAGES)
            else:
                chunk(recv, local, send, send, send, True, shift, end, True, False, VECTOR, BLOCK, EDGE, STAGES)
        elif sources == _RECV:
            _to_targets(recv, send, out, True, targets, shift, end, VECTOR, BLOCK, EDGE, STAGES)
        else:
            _to_targets(local, send, out, sources != 0, targets, shift, end, VECTOR, BLOCK, EDGE, STAGES)
    elif sources == (_RECV | _LOCAL):
        if targets == (_SEND | _OUT):
            chunk(recv, local, send, out, send, True, shift, end, True, True, VECTOR, BLOCK, EDGE, STAGES)
        else:
            dst = tl.where(targets == _SEND, send, out)
            chunk(recv, local, dst, dst, send, True, shift, end, True, False, VECTOR, BLOCK, EDGE, STAGES)
    elif targets != 0:
        src = tl.where(sources == _RECV, recv, local)
        if targets == (_SEND | _OUT):
            chunk(src, src, send, out, send, sources != 0, shift, end, False, True, VECTOR, BLOCK, EDGE, STAGES)
        else:
            dst = tl.where(targets == _SEND, send, out)
            chunk(src, src, dst, dst, send, sources != 0, shift, end, False, False, VECTOR, BLOCK, EDGE, STAGES)


@triton.jit(do_not_specialize=["count", "silence_ns"])
def persistent_kernel(
    local: tl.tensor,
    out: tl.tensor,
    send: tl.tensor,
    recv: tl.tensor,
    words: tl.tensor,
    commands: tl.tensor,
    count: tl.int32,
    silence_ns: tl.int64,
    DEPTH: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    EDGE: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Execute `count` commands in turn. `words` and `commands` are those of a FlagPage."""
    program = tl.program_id(0)
    posted = words + _LINE * (1 + program)
    done = words + _LINE * (1 + tl.num_programs(0) + program)
    post(done + 1, _RUNNING)
    finished = 0
    stop = 0
    while (finished < count) & (stop == 0):
        stop = wait(posted, words, done + 1, finished + 1, silence_ns)
        if stop == 0:
            execute(local, out, send, recv, commands + _FIELDS * (finished % DEPTH), VECTOR, BLOCK, EDGE, STAGES)
            finished += 1
            post(done, finished)
    if stop == 0:
        post(done + 1, _DONE)

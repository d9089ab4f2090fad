"""Handshake: how a program of a kernel waits for the CPU and answers it.

A wait is one block of inline assembly. Thread 0 alone polls, and its verdict reaches the others in the barrier
itself (bar.red), so that every thread of the program takes the same way: a scalar that each thread had read for
itself could differ between warps, and some would leave a loop with a barrier in it before the others. The poll
is relaxed and one acquire follows it: an acquire empties the L1 cache of its SM, which others use. The acquired
value is compared again, for ptxas leaves out an acquire whose value nobody uses.

The interpreter has no assembly; there the same functions poll with plain loads, and time is the host's.
"""

from __future__ import annotations

import time

import triton
import triton.language as tl

INTERPRETED = bool(triton.knobs.runtime.interpret)

PAUSE_S = 2e-5

_WAIT = tl.constexpr("""
{
    .reg .pred p, q;
    .reg .b32 t, v;
    .reg .b64 now, end;
    mov.b32 $0, 0;
    mov.u32 t, %tid.x;
    setp.ne.u32 p, t, 0;
    @p bra SYNC;
    mov.u64 end, %globaltimer;
    add.u64 end, end, $5;
POLL:
    ld.relaxed.sys.global.s32 v, [$1];
    setp.ge.s32 p, v, $4;
    @p bra READY;
    mov.u64 now, %globaltimer;
    setp.lt.u64 p, now, end;
    @p bra POLL;
    mov.b32 $0, 3;
    bra SYNC;
READY:
    ld.acquire.sys.global.s32 v, [$1];
    setp.lt.s32 p, v, $4;
    @p bra POLL;
    ld.relaxed.sys.global.s32 v, [$2];
    setp.ne.s32 p, v, 0;
    selp.b32 $0, 2, 0, p;
SYNC:
    setp.ne.s32 p, $0, 0;
    @p st.release.sys.global.s32 [$3], $0;
    bar.red.or.pred q, 0, p;
    selp.b32 $0, 1, 0, q;
}
""")

_POST = tl.constexpr("""
{
    .reg .pred p;
    .reg .b32 t;
    bar.sync 0;
    mov.u32 t, %tid.x;
    setp.eq.u32 p, t, 0;
    @p st.release.sys.global.s32 [$1], $2;
    mov.b32 $0, 0;
}
""")


def _now_ns() -> int:
    """The interpreter's clock; whoever polls lets other threads go on."""
    time.sleep(PAUSE_S)
    return time.monotonic_ns()


if INTERPRETED:

    @triton.jit
    def wait(
        word: tl.tensor, abort: tl.tensor, status: tl.tensor, want: tl.tensor, timeout_ns: tl.tensor
    ) -> tl.tensor:
        """See the compiled twin."""
        end = _now_ns() + timeout_ns.to(tl.int64)
        stop = 0
        while (tl.load(word, volatile=True) < want) & (stop == 0):
            if _now_ns() > end:
                stop = 3
        if (stop == 0) & (tl.load(abort, volatile=True) != 0):
            stop = 2
        if stop != 0:
            tl.store(status, stop)
            stop = 1
        return stop

    @triton.jit
    def post(word: tl.tensor, value: tl.tensor) -> None:
        """See the compiled twin."""
        tl.store(word, value)

else:

    @triton.jit
    def wait(
        word: tl.tensor, abort: tl.tensor, status: tl.tensor, want: tl.tensor, timeout_ns: tl.tensor
    ) -> tl.tensor:
        """Wait until ``word`` >= ``want``; the same for all threads: 0, or 1 if the program must end.

        It ends at an abort or after ``timeout_ns`` of waiting, and says so in ``status`` (flags.Status).
        """
        return tl.inline_asm_elementwise(
            _WAIT,
            "=&r,l,l,l,r,l,~{memory}",
            [word, abort, status, want, timeout_ns],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

    @triton.jit
    def post(word: tl.tensor, value: tl.tensor) -> None:
        """What all threads of the program have written is visible to whoever sees ``value`` in ``word``."""
        tl.inline_asm_elementwise(_POST, "=r,l,r,~{memory}", [word, value], dtype=tl.int32, is_pure=False, pack=1)

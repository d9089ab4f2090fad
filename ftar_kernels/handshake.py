"""How a program of a kernel waits for the CPU and answers it.

A wait ends when the CPU has posted, when the abort word is set, or when the engine has been silent: a program that
has waited for long looks at the beat word, which the engine advances however long its peers take. Waiting for
peers is not limited here, because only the CPU knows which waits are legitimate.

A wait is one block of inline assembly. Only thread 0 polls, and the barrier itself (bar.red) carries its verdict
to the other threads, so that all threads of a program take the same branch. If each thread read the word for
itself, warps could differ, and some would leave a loop that contains a barrier before the others. The poll is
relaxed and followed by one acquire, since an acquire empties the L1 cache of its SM, which other programs use. The
acquired value is compared again, because ptxas removes an acquire whose value is not used.

The interpreter has no assembly. There the same functions poll with plain loads, and the host's clock measures the
time.
"""

from __future__ import annotations

import time

import numpy as np
import triton
import triton.language as tl

INTERPRETED = bool(triton.knobs.runtime.interpret)

PAUSE_S = 2e-5


def uninterpretable() -> str:
    """Return why this environment's triton cannot interpret kernels; "" if it can."""
    if triton.__version__ < "3.7" and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        return f"the interpreter of triton {triton.__version__} does not know numpy {np.__version__}"
    return ""


_WAIT = tl.constexpr("""
{
    .reg .pred p, q;
    .reg .b32 t, v, beat, last;
    .reg .b64 now, end;
    mov.b32 $0, 0;
    mov.u32 t, %tid.x;
    setp.ne.u32 p, t, 0;
    @p bra SYNC;
BEGIN:
    ld.relaxed.sys.global.s32 v, [$1];
    setp.ge.s32 p, v, $4;
    @p bra READY;
    ld.relaxed.sys.global.s32 last, [$2+4];
    mov.u64 now, %globaltimer;
    add.u64 end, now, $5;
POLL:
    ld.relaxed.sys.global.s32 v, [$1];
    setp.ge.s32 p, v, $4;
    @p bra READY;
    mov.u64 now, %globaltimer;
    setp.lt.u64 p, now, end;
    @p bra POLL;
    ld.relaxed.sys.global.s32 beat, [$2+4];
    setp.ne.s32 p, beat, last;
    mov.b32 last, beat;
    add.u64 end, now, $5;
    @p bra POLL;
    mov.b32 $0, 3;
    bra SYNC;
READY:
    ld.acquire.sys.global.s32 v, [$1];
    setp.lt.s32 p, v, $4;
    @p bra BEGIN;
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
    """Return the interpreter's clock after a short sleep, which lets other threads run."""
    time.sleep(PAUSE_S)
    return time.monotonic_ns()


if INTERPRETED:

    @triton.jit
    def wait(
        word: tl.tensor, abort: tl.tensor, status: tl.tensor, want: tl.tensor, silence_ns: tl.tensor
    ) -> tl.tensor:
        """Wait as the compiled function of the same name does, with plain loads."""
        last = tl.load(abort + 1, volatile=True)
        end = _now_ns() + silence_ns.to(tl.int64)
        stop = 0
        while (tl.load(word, volatile=True) < want) & (stop == 0):
            now = _now_ns()
            if now > end:
                beat = tl.load(abort + 1, volatile=True)
                if beat == last:
                    stop = 3
                last = beat
                end = now + silence_ns.to(tl.int64)
        if (stop == 0) & (tl.load(abort, volatile=True) != 0):
            stop = 2
        if stop != 0:
            tl.store(status, stop)
            stop = 1
        return stop

    @triton.jit
    def post(word: tl.tensor, value: tl.tensor) -> None:
        """Store `value` as the compiled function of the same name does."""
        tl.store(word, value)

else:

    @triton.jit
    def wait(
        word: tl.tensor, abort: tl.tensor, status: tl.tensor, want: tl.tensor, silence_ns: tl.tensor
    ) -> tl.tensor:
        """Wait until `word` >= `want`. Return 0, or 1 if the program must end; the same in all threads.

        The program must end after an abort, or if the word behind `abort` has not changed for `silence_ns`;
        `status` (flags.Status) tells which.
        """
        return tl.inline_asm_elementwise(
            _WAIT,
            "=&r,l,l,l,r,l,~{memory}",
            [word, abort, status, want, silence_ns],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

    @triton.jit
    def post(word: tl.tensor, value: tl.tensor) -> None:
        """Store `value` in `word`; a reader that sees it also sees all earlier writes of the program."""
        tl.inline_asm_elementwise(_POST, "=r,l,r,~{memory}", [word, value], dtype=tl.int32, is_pure=False, pack=1)

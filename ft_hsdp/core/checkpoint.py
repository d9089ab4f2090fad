"""Checkpoint: which replica writes the durable checkpoint of a step. A function of what the commit token gathered.

All that hold a state hold the same bits, so one of them writes it; the others are spared (FT-HSDP §5 has one
replica write for all).
"""

from __future__ import annotations

from collections.abc import Collection


def due(step: int, every: int, last: int) -> bool:
    """Whether the state after ``step`` is to be written: each ``every`` steps (0: never), and the ``last``."""
    return bool(every) and (step % every == 0 or step == last)


def newest_due(step: int, every: int, last: int) -> int:
    """The newest step up to ``step`` whose state was to be written; 0: none was."""
    if step >= last:
        return last if every else 0
    return step - step % every if every else 0


def designated(equal: Collection[int], unwritable: Collection[int]) -> int | None:
    """The replica that writes: the lowest of ``equal`` that can; None: nobody holds the state.

    If none of them could write the last time, the lowest one tries again.
    """
    return min([r for r in equal if r not in unwritable] or equal, default=None)


def successor(equal: Collection[int], known: Collection[int], unwritable: Collection[int]) -> int | None:
    """The replica that writes at once, whatever the step, because a failure to write was heard for the first time.

    ``known`` are those of whose failure everybody had heard before. None: there is no news, or nobody is left.
    """
    if not set(unwritable) - set(known):
        return None
    return min((r for r in equal if r not in unwritable), default=None)

"""Checkpoint: which replica writes the durable checkpoint of a step. A function of what the commit token gathered.

All that hold a state hold the same bits, so one of them writes it; the others are spared (FT-HSDP §5 has one
replica write for all).
"""

from __future__ import annotations

from collections.abc import Collection


def designated(
    step: int, every: int, last: int, equal: Collection[int], unwritable: Collection[int]
) -> int | None:
    """The replica that writes the state after ``step``: the lowest of ``equal`` that can; None: none is due.

    One is due each ``every`` steps (0: never), and after the ``last`` step.
    If none of them could write the last time, the lowest one tries again.
    """
    if not every or (step % every and step != last):
        return None
    return min([r for r in equal if r not in unwritable] or equal, default=None)


def successor(
    every: int, equal: Collection[int], known: Collection[int], unwritable: Collection[int]
) -> int | None:
    """The replica that writes at once, whatever the step, because a failure to write was heard for the first time.

    ``known`` are those of whose failure everybody had heard before. None: there is no news, or nobody is left.
    """
    if not every or not set(unwritable) - set(known):
        return None
    return min((r for r in equal if r not in unwritable), default=None)

"""A rule of the product that is broken on purpose: the explorer has to find a counter-example."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple, Self
from unittest import mock

Patch = tuple[Any, str, Any]
"""A module or class, the name of what it has, and what stands there instead."""


class Mutant(NamedTuple):
    """A rule that is broken, and where the counter-example is found."""

    kind: str  # how the violation begins
    space: Any  # what may go wrong
    patches: tuple[Patch, ...]
    liveness: bool = True  # whether it may be one of liveness

    @classmethod
    def of(cls, kind: str, space: Any, *patches: Patch, liveness: bool = True) -> Self:
        return cls(kind, space, patches, liveness)


@contextlib.contextmanager
def broken(*patches: Patch) -> Iterator[None]:
    """Put each mutant in the place of what the product has, as long as the context lasts."""
    with contextlib.ExitStack() as stack:
        for place, name, mutant in patches:
            stack.enter_context(mock.patch.object(place, name, mutant))
        yield

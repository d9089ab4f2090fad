"""A rule of the product that is broken on purpose: the explorer has to find a counter-example."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

Patch = tuple[Any, str, Any]
"""A module or class, the name of what it has, and what stands there instead."""


@contextlib.contextmanager
def broken(*patches: Patch) -> Iterator[None]:
    """Put each mutant in the place of what the product has, as long as the context lasts."""
    with contextlib.ExitStack() as stack:
        for place, name, mutant in patches:
            stack.enter_context(mock.patch.object(place, name, mutant))
        yield

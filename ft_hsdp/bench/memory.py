"""Memory: all contenders hold their tensors at once, and the machine has other users."""

from __future__ import annotations

from collections.abc import Iterable

import psutil

from ft_hsdp.bench.options import GIB, size_name
from ft_hsdp.bench.roster import Contender
from ft_hsdp.errors import ConfigError

SPARE = 1.2  # of what the tensors take


def check_memory(contenders: Iterable[Contender], members: int, size: int) -> None:
    """Raises ConfigError where tensors of `size` bytes do not fit at all members of all contenders at once."""
    copies = sum(contender.copies for contender in contenders) * members
    check_room(copies, size, "all contenders at once take")


def check_room(copies: int, size: int, who: str) -> None:
    """Raises ConfigError where `copies` times `size` bytes do not fit."""
    need, free = SPARE * copies * size, psutil.virtual_memory().available
    if need > free:
        allowed = f"what fits into {free / GIB:.1f} GiB; {who} {need / GIB:.1f} GiB"
        raise ConfigError("--sizes", size_name(size), allowed)

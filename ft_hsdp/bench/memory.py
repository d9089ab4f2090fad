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
    need = SPARE * sum(contender.copies for contender in contenders) * members * size
    free = psutil.virtual_memory().available
    if need > free:
        allowed = f"what fits into {free / GIB:.1f} GiB; all contenders at once take {need / GIB:.1f} GiB"
        raise ConfigError("--sizes", size_name(size), allowed)

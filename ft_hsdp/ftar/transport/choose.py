"""Choose: which transport an edge gets, from what both ends can do."""

from __future__ import annotations

from collections.abc import Sequence

from ft_hsdp.ftar.transport.c10d import C10d
from ft_hsdp.ftar.transport.kind import Kind
from ft_hsdp.ftar.transport.shm import Shm
from ft_hsdp.ftar.transport.tcp import Tcp

KINDS: dict[str, Kind] = {"tcp": Tcp(), "shm": Shm(), "c10d": C10d()}


def choose(mine: Sequence[str], theirs: Sequence[str], same_host: bool) -> str | None:
    """The first of the caller's offers that this end has too; shared memory only on one host. None: none fits."""
    return next((o for o in theirs if o in mine and (o != "shm" or same_host)), None)

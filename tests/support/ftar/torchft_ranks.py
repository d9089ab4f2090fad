"""A few ranks of ProcessGroupFTAR as threads of one process, around a store."""

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore

from ft_hsdp.compat.torchft import ProcessGroupFTAR


class Ranks:
    """``size`` groups, the first configure done; `all` calls a function for each of them at once."""

    def __init__(self, size: int, timeout_s: float = 30.0, host: str | None = None) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._prefixes = itertools.count()
        self.groups = [ProcessGroupFTAR(timedelta(seconds=timeout_s), host=host) for _ in range(size)]
        self._threads = ThreadPoolExecutor(size)
        self.configure(self.groups)

    def prefix(self) -> str:
        return f"127.0.0.1:{self.store.port}/prefix{next(self._prefixes)}"

    def configure(self, groups: list[ProcessGroupFTAR]) -> None:
        address = self.prefix()
        self.each(lambda group, rank: group.configure(address, str(rank), rank, len(groups)), groups)

    def each(
        self, function: Callable[[ProcessGroupFTAR, int], Any], groups: list[ProcessGroupFTAR] | None = None
    ) -> list[Any]:
        """``function(group, rank)`` for all, at the same time; what each returned or raised."""
        chosen = self.groups if groups is None else groups
        waiting = [self._threads.submit(function, group, rank) for rank, group in enumerate(chosen)]
        return [w.result(60) for w in waiting]

    def close(self) -> None:
        self.each(lambda group, rank: group.shutdown())
        self._threads.shutdown()


@pytest.fixture(scope="module")
def of_module() -> Iterator[Ranks]:
    ranks = Ranks(3, host="127.0.0.1")
    yield ranks
    ranks.close()


@pytest.fixture
def three(of_module: Ranks) -> Ranks:
    of_module.configure(of_module.groups)
    return of_module

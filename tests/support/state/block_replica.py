"""A replica's stores of blocks: agents are processes, the ranks are threads that exchange bytes."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np

from ft_hsdp.config.running import MemoryConfig
from ft_hsdp.train.state.block_store import BlockStore, SubmittedBlocks
from ft_hsdp.train.state.snapshots import AgentHome
from tests.support.state import agent_helpers
from tests.support.state.agent_helpers import DEADLINE_S
from tests.support.state.thread_group import ThreadGroup

BLOCKS, BLOCK_BYTES = 1000, 24
DATA = np.random.default_rng(0).integers(0, 256, (BLOCKS, BLOCK_BYTES), dtype=np.uint8)


class Rank:
    def __init__(self, rank: int, ranks: int, host: str, budget_gb: float | None) -> None:
        self.rank = rank
        self.ranks = ranks
        self.host = host
        self.alone = False  # in a replay, which has no agents
        self.events: list[tuple[str, str, dict[str, object]]] = []
        timeouts = SimpleNamespace(load_s=DEADLINE_S, agent_s=DEADLINE_S)
        self.config = SimpleNamespace(timeouts=timeouts, memory=MemoryConfig(budget_gb=budget_gb))

    def agent_home(self, caller: str) -> AgentHome | None:
        return None if self.alone else AgentHome(agent_helpers.TOKEN, 0, self.rank, self.ranks, None, self.host)

    def note_event(self, event: str, reason: str, **facts: object) -> None:
        self.events.append((event, reason, facts))

    def told(self, event: str) -> list[tuple[str, dict[str, object]]]:
        return [(reason, facts) for name, reason, facts in self.events if name == event]


def store_of(job: Any, **described: Any) -> BlockStore:
    return BlockStore(job, **{"name": "points", "blocks": BLOCKS, "block_bytes": BLOCK_BYTES, **described})


class Replica:
    """The ranks of one incarnation of a replica, two on each host, with a store each."""

    def __init__(
        self, hosts: Sequence[str], per_host: int = 2, budget_gb: float | None = None, **described: Any
    ) -> None:
        ranks = len(hosts) * per_host
        self.jobs = [Rank(rank, ranks, hosts[rank // per_host], budget_gb) for rank in range(ranks)]
        self.stores = [store_of(job, **described) for job in self.jobs]
        for store, group in zip(self.stores, ThreadGroup.of(ranks), strict=True):
            store._group = group
        self.read: list[tuple[int, int]] = []  # what was read from the source

    def source(self, first: int, end: int) -> np.ndarray:
        self.read.append((first, end))
        return DATA[first:end]

    def each(self, work: Callable[[BlockStore], Any]) -> list[Any]:
        with ThreadPoolExecutor(len(self.stores)) as pool:
            return list(pool.map(work, self.stores))

    def submit(self) -> SubmittedBlocks:
        found = self.each(lambda store: store.submit(self.source))
        assert len(set(found)) == 1
        return found[0]

    def check(self) -> None:
        """Each rank loads its part; all parts together are the data."""
        parts = self.each(lambda store: store.load([store.share()]))
        assert np.array_equal(np.concatenate(parts), DATA)


@contextmanager
def hosts(*names: str) -> Iterator[dict[str, agent_helpers.Running]]:
    """State agents of so many hosts, until the end of the block."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(agent_helpers.agent(0, "--name", name)) for name in names}


def kill(running: agent_helpers.Running) -> None:
    running.process.kill()
    running.process.wait(DEADLINE_S)

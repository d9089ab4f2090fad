"""A store of blocks: agents are processes, the ranks of a replica are threads that exchange bytes."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ft_hsdp
from ft_hsdp.errors import ConfigError, Retryable
from ft_hsdp.state.agent import blocks as agent_blocks
from ft_hsdp.state.replica_group import Failed
from ft_hsdp.train.state.block_store import BlockStore, SubmittedBlocks
from ft_hsdp.train.state.snapshots import AgentHome
from tests.support.state import agent_helpers
from tests.support.state.agent_helpers import DEADLINE_S, TOKEN

BLOCKS, BLOCK_BYTES, RANKS = 1000, 24, 4
DATA = np.random.default_rng(0).integers(0, 256, (BLOCKS, BLOCK_BYTES), dtype=np.uint8)


class Group:
    """What the ranks of a replica tell each other, between threads."""

    def __init__(self, rank: int, shared: list[Any], barrier: threading.Barrier) -> None:
        self.rank = rank
        self._shared = shared
        self._barrier = barrier

    def on_all(self, work: Callable[[], Any]) -> list[Any]:
        try:
            self._shared[self.rank] = {"done": json.loads(json.dumps(work()))}
        except Exception as error:
            self._shared[self.rank] = {"error": str(error)}
        self._barrier.wait(DEADLINE_S)
        told = list(self._shared)
        self._barrier.wait(DEADLINE_S)
        errors = [f"rank {rank}: {each['error']}" for rank, each in enumerate(told) if "error" in each]
        if errors:
            raise Failed("; ".join(errors))
        return [each["done"] for each in told]


class Rank:
    """What a store needs of a job."""

    def __init__(self, rank: int, ranks: int, host: str, budget_gb: float | None) -> None:
        self.rank = rank
        self.ranks = ranks
        self.host = host
        self.events: list[tuple[str, str, dict[str, object]]] = []
        timeouts = SimpleNamespace(load_s=DEADLINE_S, agent_s=DEADLINE_S)
        self.config = SimpleNamespace(timeouts=timeouts, memory=SimpleNamespace(budget_gb=budget_gb))

    def agent_home(self, caller: str) -> AgentHome | None:
        return AgentHome(TOKEN, 0, self.rank, self.ranks, None, self.host)

    def note_event(self, event: str, reason: str, **facts: object) -> None:
        self.events.append((event, reason, facts))

    def told(self, event: str) -> list[tuple[str, dict[str, object]]]:
        return [(reason, facts) for name, reason, facts in self.events if name == event]


made: list[BlockStore] = []


def store_of(job: Any, **described: Any) -> BlockStore:
    return BlockStore(job, **{"name": "points", "blocks": BLOCKS, "block_bytes": BLOCK_BYTES, **described})


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while made:
        made.pop().close()


class Replica:
    """The ranks of one incarnation of a replica, two on each host, with a store each."""

    def __init__(
        self, hosts: Sequence[str], per_host: int = 2, budget_gb: float | None = None, **described: Any
    ) -> None:
        ranks = len(hosts) * per_host
        shared, barrier = [None] * ranks, threading.Barrier(ranks)
        self.jobs = [Rank(rank, ranks, hosts[rank // per_host], budget_gb) for rank in range(ranks)]
        self.stores = [store_of(job, **described) for job in self.jobs]
        made.extend(self.stores)
        for rank, store in enumerate(self.stores):
            store._group = Group(rank, shared, barrier)
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

    def close(self) -> None:
        for store in self.stores:
            store.close()


@contextmanager
def hosts(*names: str) -> Iterator[dict[str, agent_helpers.Running]]:
    with ExitStack() as stack:
        yield {name: stack.enter_context(agent_helpers.agent(0, "--name", name)) for name in names}


def kill(running: agent_helpers.Running) -> None:
    running.process.kill()
    running.process.wait(DEADLINE_S)


def test_a_lost_host_costs_no_block_and_its_successor_gets_what_it_held() -> None:
    with hosts("a", "b", "c", "d") as agents:
        first = Replica(["a", "b", "c"])
        assert first.submit() == SubmittedBlocks(copies=2, read=BLOCKS, copied=BLOCKS, kept=0)
        assert sorted(first.read) == sorted(set(first.read)), "each block is read once"
        assert sum(end - begin for begin, end in first.read) == BLOCKS
        first.check()
        assert len(first.jobs[0].told("BlocksSubmitted")) == 1
        first.close()
        kill(agents["b"])
        second = Replica(["a", "d", "c"])
        result = second.submit()
        assert result.copies == 2
        assert result.read == 0
        assert 0 < result.copied < BLOCKS
        assert result.copied + result.kept == 2 * BLOCKS, "what was there did not move"
        second.check()
        assert second.read == []
        assert second.submit() == SubmittedBlocks(copies=2, read=0, copied=0, kept=2 * BLOCKS)
        second.close()


def test_a_holder_that_is_lost_in_the_middle_is_replaced_by_the_next_and_what_none_has_is_read_again() -> None:
    with hosts("a", "b", "c") as agents:
        replica = Replica(["a", "b", "c"])
        replica.submit()
        replica.read.clear()
        kill(agents["a"])
        reader = replica.stores[5]
        assert np.array_equal(reader.load([(0, 600)]), DATA[:600])
        assert reader.counts.rejected == 1
        ((why, facts),) = replica.jobs[5].told("BlocksRejected")
        assert (facts["host"], facts["store"]) == ("a", "points")
        assert replica.read == []
        kill(agents["b"])
        assert np.array_equal(reader.load([(600, BLOCKS), (0, 10)]), np.concatenate((DATA[600:], DATA[:10])))
        ((why, facts),) = replica.jobs[5].told("BlocksRead")
        assert sum(end - begin for begin, end in replica.read) == facts["blocks"] == reader.counts.read > 0
        assert "no host delivers blocks " in why
        replica.close()


def test_fewer_hosts_go_on_with_the_same_slices_and_have_all_copies_again() -> None:
    with hosts("a", "b", "c") as agents:
        first = Replica(["a", "b", "c"])
        first.submit()
        first.close()
        kill(agents["c"])
        second = Replica(["a", "b"])
        result = second.submit()
        assert (result.copies, result.read) == (2, 0)
        second.check()
        wanted = {store._job.rank: [store.share()] for store in second.stores}
        parts = second.each(lambda store: store.load(wanted))
        assert np.array_equal(np.concatenate(parts), DATA)
        second.close()


def test_what_all_hosts_have_lost_is_read_again_and_said() -> None:
    with hosts("a", "b", "c", "d") as agents:
        first = Replica(["a", "b", "c"])
        first.submit()
        first.close()
        kill(agents["a"])
        kill(agents["b"])
        second = Replica(["d", "c"])
        result = second.submit()
        assert 0 < result.read < BLOCKS
        ((why, facts),) = second.jobs[0].told("BlocksRead")
        assert facts["blocks"] == result.read
        assert "no host has blocks " in why
        assert str(facts["origin"]).endswith("source")
        second.check()
        second.close()


def test_a_full_agent_gives_way_to_the_next_host_and_a_lack_of_copies_is_said() -> None:
    with hosts("a", "b", "c"):
        tight = Replica(["a", "b", "c"], budget_gb=10e-6)  # 10 kB: one of six slices of 8 kB on each host
        result = tight.submit()
        assert (result.copies, result.read) == (1, BLOCKS)
        ((why, facts),) = tight.jobs[0].told("BlocksUnprotected")
        assert "memory.budget_gb" in why
        assert facts["copies"] == 1
        tight.check()
        tight.close()
        none = Replica(["a", "b", "c"], budget_gb=1e-6, permute=False)  # another store: the first one goes
        assert none.submit().copies == 0
        none.read.clear()
        none.check()
        assert sum(end - begin for begin, end in none.read) == BLOCKS
        none.close()


def test_an_agent_that_stands_still_holds_up_no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ft_hsdp.state.transfer.blocks.SILENT_S", 0.5)
    with hosts("a", "b") as agents:
        replica = Replica(["a", "b"])
        replica.submit()
        agents["a"].process.send_signal(signal.SIGSTOP)
        assert np.array_equal(replica.stores[0].load([(0, BLOCKS)]), DATA)
        assert replica.stores[0].counts.rejected == 1
        replica.close()


def test_a_source_that_fails_on_one_rank_is_an_error_on_all_of_them(tmp_path: Path) -> None:
    path = tmp_path / "points"
    path.write_bytes(DATA.tobytes())
    with hosts("a", "b"):
        replica = Replica(["a", "b"])

        def broken(first: int, end: int) -> np.ndarray:
            if first == 0:
                raise OSError("the disk is gone")
            return DATA[first:end]

        def fails(store: BlockStore) -> str:
            with pytest.raises(Retryable) as caught:
                store.submit(broken)
            return str(caught.value)

        assert all("cannot be read: the disk is gone" in line for line in replica.each(fails))
        (read,) = set(replica.each(lambda store: store.submit(path).read))
        assert 0 < read <= BLOCKS, "what was begun is begun anew"
        replica.check()
        replica.close()


def test_loads_fetch_little_more_than_what_is_asked_for() -> None:
    with hosts("a", "b"):
        replica = Replica(["a", "b"], per_host=1, copies=1)
        replica.submit()
        store = replica.stores[0]
        store.load([(i, i + store.align) for i in range(0, BLOCKS - store.align, 4 * store.align)])
        assert store.counts.received_bytes == store.counts.loaded * BLOCK_BYTES
        replica.close()


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    job = Rank(0, 1, "", None)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"name": "a b"}, "BlockStore(name)"),
        ({"blocks": 0}, "BlockStore(blocks)"),
        ({"block_bytes": True}, "BlockStore(block_bytes)"),
        ({"copies": 17}, "an integer from 1 to 16"),
    ]
    for described, line in cases:
        with pytest.raises(ConfigError) as caught:
            store_of(job, **described)
        assert line in str(caught.value)
        assert "\n" not in str(caught.value)
    store = store_of(job)
    with pytest.raises(ConfigError, match=r"a call after BlockStore\.submit"):
        store.load([(0, 1)])
    with pytest.raises(ConfigError, match="No such file"):
        store.submit(tmp_path / "none")
    (tmp_path / "short").write_bytes(b"123")
    with pytest.raises(ConfigError, match=r"short of 3 bytes.*24000 bytes: 1000 blocks of 24"):
        store.submit(str(tmp_path / "short"))
    store._read = lambda first, end: DATA[first:end]  # as in a replay, which has no agents
    wrong: list[Any] = [[(0, 1001)], [(5, 4)], [(0, 5), (4, 6)], [3], {0: [(-1, 2)]}]
    for wanted in wrong:
        with pytest.raises(ConfigError, match=r"BlockStore\.load"):
            store.load(wanted)
    assert np.array_equal(store.load([(7, 9), (0, 2)]), np.concatenate((DATA[7:9], DATA[0:2])))
    store._read = lambda first, end: b"1"
    with pytest.raises(ConfigError, match="24 bytes for blocks 0 to 1"):
        store.load([(0, 1)])


def test_it_is_public_and_the_agents_part_needs_no_torch() -> None:
    assert ft_hsdp.BlockStore is BlockStore
    assert "torch" not in vars(agent_blocks)

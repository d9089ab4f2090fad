"""A store of blocks: agents are processes, the ranks of a replica are threads that exchange bytes."""

import os
import re
import signal
import threading
from collections import Counter
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import ft_hsdp
from ft_hsdp.errors import Retryable
from ft_hsdp.memory.blocks import first_hosts, share
from ft_hsdp.state.agent import client
from ft_hsdp.state.agent.client import BlockAgent
from ft_hsdp.state.transfer.blocks import SliceRead, SlicesRead
from ft_hsdp.state.transfer.donor_connection import Answer, DonorConnection
from ft_hsdp.train.state.block_data import BlockData, BlockReader
from ft_hsdp.train.state.block_store import BlockStore, SubmittedBlocks
from ft_hsdp.train.state.block_submission import COPY_BYTES_PER_S, COPY_S, BlockHolders
from tests.support.forked import of_ranks
from tests.support.refused import refused
from tests.support.state import agent_helpers
from tests.support.state.agent_helpers import TOKEN
from tests.support.state.block_replica import BLOCK_BYTES, BLOCKS, DATA, Rank, Replica, hosts, kill, store_of
from tests.support.state.thread_group import ThreadGroup


def kill_in_answer(monkeypatch: pytest.MonkeyPatch, holder: agent_helpers.Running, number: int) -> None:
    """Kill a holder once it has answered so many requests for bytes, before the last answer is read."""
    ask, asked = DonorConnection.ask, 0

    def asks(self: DonorConnection, path: str, span: tuple[int, int] | None = None) -> Answer:
        nonlocal asked
        answer = ask(self, path, span)
        if span is not None and self._address == holder.address:
            asked += 1
            if asked == number:
                kill(holder)
        return answer

    monkeypatch.setattr(DonorConnection, "ask", asks)


def test_a_lost_host_costs_no_block_and_its_successor_gets_what_it_held() -> None:
    with hosts("a", "b", "c", "d") as agents:
        first = Replica(["a", "b", "c"])
        assert first.submit() == SubmittedBlocks(copies=2, read=BLOCKS, copied=BLOCKS, kept=0)
        assert sorted(first.read) == sorted(set(first.read)), "each block is read once"
        assert sum(end - begin for begin, end in first.read) == BLOCKS
        first.check()
        assert len(first.jobs[0].told("BlocksSubmitted")) == 1
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


def test_a_holder_that_is_killed_in_a_load_is_replaced_by_the_next_and_what_none_has_is_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with hosts("a", "b", "c") as agents:
        replica = Replica(["a", "b", "c"])
        replica.submit()
        replica.read.clear()
        kill_in_answer(monkeypatch, agents["a"], 3)
        reader = replica.stores[5]
        assert np.array_equal(reader.load([(0, 600)]), DATA[:600])
        assert agents["a"].process.poll() is not None, "it was killed in the load"
        assert reader.counts.received_bytes > 600 * BLOCK_BYTES, "what it had sent came again from the next one"
        assert reader.counts.rejected == 1
        ((why, facts),) = replica.jobs[5].told("BlocksRejected")
        assert (facts["host"], facts["store"]) == ("a", "points")
        assert replica.read == []
        kill_in_answer(monkeypatch, agents["b"], 2)
        assert np.array_equal(reader.load([(600, BLOCKS), (0, 10)]), np.concatenate((DATA[600:], DATA[:10])))
        assert agents["b"].process.poll() is not None
        ((why, facts),) = replica.jobs[5].told("BlocksRead")
        assert sum(end - begin for begin, end in replica.read) == facts["blocks"] == reader.counts.read > 0
        assert "no host delivers blocks " in why


@given(data=st.data(), copies=st.integers(1, 3), permute=st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_load_returns_the_blocks_in_the_order_of_its_spans_whoever_fails(data, copies, permute) -> None:
    """Spans in any order, many of them touch; hosts that refuse all, or fail in the middle of a slice."""
    store = store_of(Rank(1, 4, "a", None), copies=copies, permute=permute)
    store._reader = BlockReader(store._data, lambda first, end: DATA[first:end])
    layout = store._data.cut(3)
    hosts = ["0", "1", "2"]
    holders = {number: list(first_hosts(number, layout.slices, 3, copies)) for number in range(layout.slices)}
    digests = dict.fromkeys(range(layout.slices), "0" * 64)
    store._known = BlockHolders(layout, hosts, [0, 0, 1, 2], hosts, holders, digests)
    whole = {number: np.zeros((layout.slice_blocks(number), BLOCK_BYTES), np.uint8) for number in digests}
    for number, content in whole.items():
        for run in layout.contents(number):
            content[run.offset : run.offset + run.count] = DATA[run.block : run.block + run.count]
    refusing = data.draw(st.sets(st.sampled_from(hosts)), "refusing")
    failing = data.draw(st.sets(st.tuples(st.sampled_from(hosts), st.sampled_from(sorted(digests)))), "failing")

    def read(orders: list[SliceRead], into: memoryview, *_: Any) -> SlicesRead:
        failed = []
        for order in orders:
            fails = order.address in refusing or (order.address, order.about.slice) in failing
            assert order.address in {hosts[each] for each in holders[order.about.slice]}
            for begin, nbytes, target in order.spans[: 1 if fails else None]:
                into[target : target + nbytes] = whole[order.about.slice].reshape(-1)[begin : begin + nbytes]
            if fails:
                failed.append((order, "it fails"))
        return SlicesRead(failed)

    cuts = sorted(data.draw(st.sets(st.integers(1, BLOCKS - 1), max_size=12), "cuts"))
    spans = list(pairwise([0, *cuts, BLOCKS]))
    spans = data.draw(st.lists(st.sampled_from(spans), min_size=1, unique=True), "spans")
    wanted: Any = {**dict(enumerate([[span] for span in share(BLOCKS, 4)])), 1: spans}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ft_hsdp.state.transfer.blocks.read_slices", read)
        found = store.load(wanted if data.draw(st.booleans(), "all ranks") else spans)
    assert np.array_equal(found, np.concatenate([DATA[first:end] for first, end in spans]))


def test_bytes_that_flip_in_memory_are_found_in_a_load_and_mended_by_the_next_submission(monkeypatch) -> None:
    write = BlockAgent.write
    written: list[Any] = []

    def kept(self: BlockAgent, *args: Any) -> Any:
        written.append(memory := write(self, *args))
        return memory

    monkeypatch.setattr(BlockAgent, "write", kept)
    with hosts("a", "b", "c"):
        replica = Replica(["a", "b", "c"], per_host=1)
        replica.submit()
        replica.read.clear()
        assert len(written) == 3
        for memory in written:  # the first copy of each slice, which the rank on the same host reads
            memory[BLOCK_BYTES] ^= 1
        for store, job in zip(replica.stores, replica.jobs, strict=True):
            assert np.array_equal(store.load([(0, BLOCKS)]), DATA)
            assert job.host in {facts["host"] for _, facts in job.told("BlocksRejected")}
            assert all("has a wrong checksum" in why for why, _ in job.told("BlocksRejected"))
        assert replica.submit() == SubmittedBlocks(copies=2, read=0, copied=BLOCKS, kept=BLOCKS)
        assert replica.read == []


def test_a_submission_that_is_interrupted_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks of a host read, and no rank waits for another longer than one slice takes."""
    monkeypatch.setattr("ft_hsdp.train.state.block_data.SLICE_BYTES", 2000)
    rank, told, written, copied = threading.get_ident, ThreadGroup.on_all, BlockAgent.written, BlockAgent.keep
    slices, since, most, orders = Counter[int](), Counter[int](), Counter[int](), list[Any]()

    def tells(self: ThreadGroup, work: Any) -> Any:
        try:
            return told(self, work)
        finally:
            most[rank()] = max(most[rank()], since.pop(rank(), 0))

    def writes(self: BlockAgent, *args: Any) -> str:
        slices[rank()] += 1
        since[rank()] += 1
        return written(self, *args)

    def copies(self: BlockAgent, order: Any) -> str:
        since[rank()] += 1
        orders.append(order)
        return copied(self, order)

    monkeypatch.setattr(ThreadGroup, "on_all", tells)
    monkeypatch.setattr(BlockAgent, "written", writes)
    monkeypatch.setattr(BlockAgent, "keep", copies)
    with hosts("a", "b"):
        replica = Replica(["a", "b"])

        def interrupted(store: BlockStore) -> None:
            def source(first: int, end: int) -> np.ndarray:
                if store is replica.stores[0] and slices[rank()] == 2:
                    raise OSError("the disk is slow")
                return replica.source(first, end)

            with pytest.raises(Retryable, match="the disk is slow"):
                store.submit(source)

        replica.each(interrupted)
        assert len(slices) == 4, "all ranks read"
        kept = sum(end - first for first, end in replica.read)
        assert kept > BLOCKS // 2
        assert replica.submit() == SubmittedBlocks(copies=2, read=BLOCKS - kept, copied=BLOCKS, kept=kept)
        assert sum(end - first for first, end in replica.read) == BLOCKS, "what is complete is not read again"
        assert set(most.values()) == {1}
        least_s = [COPY_S + each.about.nbytes / COPY_BYTES_PER_S for each in orders]
        assert any(each.deadline_s > s for each, s in zip(orders, least_s, strict=True)), "two share a link"
        replica.check()


def test_several_stores_of_a_rank_submit_in_turns_also_once_their_agent_was_replaced() -> None:
    stores = [Replica(["a"], per_host=1, name=name) for name in ("points", "features")]
    for _ in range(2):
        with hosts("a"):
            assert [store.submit().read for store in stores * 2] == [BLOCKS, BLOCKS, 0, 0]


def test_slices_are_small_and_there_is_one_for_each_rank_as_far_as_there_are_ranges() -> None:
    def parts(blocks: int, block_bytes: int, hosts: int, ranks: int) -> int:
        data = BlockData.described("points", blocks, block_bytes, 2, permute=True)
        cut = data.first_cut(hosts, ranks)
        assert cut == data.cut(cut.slices // cut.parts, cut.parts), "what is held says how it was cut"
        assert cut.slices // cut.parts == min(hosts, cut.ranges)
        return cut.parts

    assert parts(BLOCKS, BLOCK_BYTES, 4, 2) == 2
    assert parts(BLOCKS, BLOCK_BYTES, 48, 8) == 1
    assert parts(1 << 20, 1 << 10, 2, 1) == 2
    assert parts(1 << 24, 1 << 10, 2, 8) == 32
    assert parts(1 << 30, 1 << 20, 64, 8) == 64
    assert parts(1 << 30, 1 << 20, 1 << 15, 8) == 2


def test_hosts_that_hold_slices_of_another_cut_count_as_empty() -> None:
    data = BlockData.described("points", BLOCKS, BLOCK_BYTES, 2, permute=True)
    known = BlockHolders(data.cut(1), ["a", "b", "c"], [0, 0, 1, 1, 2, 2])
    known.take([], data)
    assert (known.layout.slices, known.layout.parts, known.holders) == (6, 2, {})
    rows = [(0, 1, 8, 2, "x"), (1, 1, 8, 2, "x"), (1, 5, 8, 2, "y"), (2, 1, 8, 4, "x"), (2, 5, 8, 2, "z")]
    known.take([*rows, (0, 9, 8, 2, "x"), (2, 0, 7, 2, "x")], data)
    assert (known.layout.slices, known.layout.parts) == (8, 2)
    assert known.holders == {1: [0, 1], 5: [2]}
    known.take([(0, 1, 7, 2, "x")], data)
    assert known.holders == {}, "no store of these data is cut like that"


def submitted(token: str, killed: int | None) -> dict[str, Any]:
    """What a rank of four sees. The killed one has memory for a slice then, and begins to read another."""
    agent_helpers.TOKEN = token
    rank, read = dist.get_rank(), list[tuple[int, int]]()
    store = store_of(Rank(rank, 4, "ab"[rank // 2], None))

    def source(first: int, end: int) -> np.ndarray:
        if rank == killed and read:
            os.kill(os.getpid(), signal.SIGKILL)
        read.append((first, end))
        return DATA[first:end]

    try:
        done = asdict(store.submit(source))
    except Retryable as error:
        return {"error": str(error), "source": sum(b - a for a, b in read)}
    first, end = store.share()
    right = np.array_equal(store.load([(first, end)]), DATA[first:end])
    return {**done, "right": right, "source": sum(b - a for a, b in read)}


@pytest.mark.proof
def test_a_rank_that_is_killed_in_a_submission_costs_no_slice_that_is_complete() -> None:
    with hosts("a", "b"):
        lives = [of_ranks(4, submitted, TOKEN, killed) for killed in (2, None)]
        assert lives[0][2] == {"exit": -signal.SIGKILL}
        first = {rank: row for rank, row in enumerate(lives[0]) if rank != 2}
        second = lives[1]
        assert all("the blocks of points are not in memory: " in row["error"] for row in first.values())
        assert all(row["right"] for row in second)
        (done,) = {(row["copies"], row["read"], row["copied"], row["kept"]) for row in second}
        kept = sum(row["source"] for row in first.values())
        assert 0 < kept < BLOCKS, "three slices were complete; the other one was begun"
        assert done == (2, BLOCKS - kept, BLOCKS, kept)
        assert sum(row["source"] for row in second) == BLOCKS - kept, "what is complete is not read again"


def test_fewer_hosts_go_on_with_the_same_slices_and_have_all_copies_again() -> None:
    with hosts("a", "b", "c") as agents:
        first = Replica(["a", "b", "c"])
        first.submit()
        kill(agents["c"])
        second = Replica(["a", "b"])
        result = second.submit()
        assert (result.copies, result.read) == (2, 0)
        second.check()
        wanted = {rank: [store.share()] for rank, store in enumerate(second.stores)}
        parts = second.each(lambda store: store.load(wanted))
        assert np.array_equal(np.concatenate(parts), DATA)


def test_what_all_hosts_have_lost_is_read_again_and_said() -> None:
    with hosts("a", "b", "c", "d") as agents:
        first = Replica(["a", "b", "c"])
        first.submit()
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


def test_a_full_agent_gives_way_to_the_next_host_and_a_lack_of_copies_is_said() -> None:
    with hosts("a", "b", "c"):
        tight = Replica(["a", "b", "c"], budget_gb=10e-6)  # 10 kB: one of six slices of 8 kB on each host
        result = tight.submit()
        assert (result.copies, result.read) == (1, BLOCKS)
        ((why, facts),) = tight.jobs[0].told("BlocksSubmitted")
        assert re.fullmatch(r".*; \d+ bytes are needed; \d+ of 10000 bytes of memory\.budget_gb are taken", why)
        assert facts["copies"] == 1 < facts["wanted"]
        tight.check()
        none = Replica(["a", "b", "c"], budget_gb=1e-6, permute=False)  # another store: the first one goes
        assert none.submit().copies == 0
        none.read.clear()
        none.check()
        assert sum(end - begin for begin, end in none.read) == BLOCKS


def test_an_agent_that_stands_still_holds_up_no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ft_hsdp.state.transfer.blocks.SILENT_S", 0.5)
    with hosts("a", "b") as agents:
        replica = Replica(["a", "b"])
        replica.submit()
        agents["a"].process.send_signal(signal.SIGSTOP)
        assert np.array_equal(replica.stores[0].load([(0, BLOCKS)]), DATA)
        assert replica.stores[0].counts.rejected == 1


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


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    job = Rank(0, 1, "", None)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"name": "a b"}, "BlockStore(name)"),
        ({"blocks": 0}, "BlockStore(blocks)"),
        ({"block_bytes": True}, "BlockStore(block_bytes)"),
        ({"copies": 17}, "an integer from 1 to 16"),
    ]
    for described, line in cases:
        refused(lambda described=described: store_of(job, **described), re.escape(line))
    store = store_of(job)
    refused(lambda: store.load([(0, 1)]), r"a call after BlockStore\.submit")
    refused(lambda: store.submit(tmp_path / "none"), "No such file")
    (tmp_path / "short").write_bytes(b"123")
    refused(lambda: store.submit(str(tmp_path / "short")), r"short of 3 bytes.*24000 bytes: 1000 blocks of 24")
    job.alone = True
    store.submit(lambda first, end: DATA[first:end])
    wrong: list[Any] = [[(0, 1001)], [(5, 4)], [(0, 5), (4, 6)], [3], [(0.9, 3.9)], [("0", "1")], {0: [(-1, 2)]}]
    for wanted in wrong:
        refused(lambda wanted=wanted: store.load(wanted), r"BlockStore\.load")
    whole: Any = [(np.int64(7), np.int64(9)), (0, 2)]  # whole numbers of any kind
    assert np.array_equal(store.load(whole), np.concatenate((DATA[7:9], DATA[0:2])))
    store.submit(lambda first, end: b"1")
    refused(lambda: store.load([(0, 1)]), "24 bytes for blocks 0 to 1")


def test_it_is_public_and_the_agents_part_needs_no_torch() -> None:
    assert ft_hsdp.BlockStore is BlockStore
    assert "torch" not in vars(client)

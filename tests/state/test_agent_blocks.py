"""Slices of block stores in state agents: agents as processes where one dies, else in this one."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ft_hsdp.errors import DataCorruption
from ft_hsdp.handshake import HungUp, Purpose, call_blocking
from ft_hsdp.state.agent import messages
from ft_hsdp.state.agent.blocks import BlockAgent, BlockSession, SliceStore
from ft_hsdp.state.agent.client import AgentGone, AgentSocket
from ft_hsdp.state.agent.messages import CopySlice, Done, DropSlices
from ft_hsdp.state.agent.session import AgentConnection
from ft_hsdp.state.agent.shard import Owner
from ft_hsdp.state.agent.starter import connect_newest
from ft_hsdp.state.agent.store import SnapshotStore
from ft_hsdp.state.shared_memory import InMemorySnapshots, ServedSnapshot, attach
from ft_hsdp.state.transfer import blocks
from ft_hsdp.state.transfer.blocks import SliceManifest, SliceName, SliceRead, read_slices
from ft_hsdp.state.transfer.donor_connection import Answer, DonorBusy, DonorConnection
from ft_hsdp.state.transfer.http import StateServer
from tests.support.state import agent_helpers
from tests.support.state.agent_helpers import DEADLINE_S, TOKEN
from tests.support.state.slow_links import ThrottledLinks

STORE = "5" * 32
PIECE = 1000
NBYTES = 10 * PIECE + 17


def about(number: int = 0, store: str = STORE, nbytes: int = NBYTES) -> SliceName:
    return SliceName(store, "points", number, 4, nbytes, PIECE)


def content(number: int = 0, nbytes: int = NBYTES) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, nbytes, dtype=np.uint8)


def manifest(number: int = 0, store: str = STORE) -> SliceManifest:
    return SliceManifest(about(number, store), blocks.sums_of(content(number).data, PIECE))


def digest(number: int = 0) -> str:
    return blocks.digest_of(blocks.encode(manifest(number)))


def write(agent: BlockAgent, number: int = 0, store: str = STORE) -> str:
    memory = agent.write(about(number, store), None, DEADLINE_S)
    if isinstance(memory, str):
        return memory
    memory[:] = content(number)
    del memory
    return agent.written(manifest(number, store))


def complete(slices: SliceStore, number: int, store: str = STORE, budget: int | None = None) -> np.ndarray:
    made = slices.allocate(about(number, store), budget)
    memory = attach(made.fd, NBYTES, writable=True)
    memory[:] = content(number)
    slices.complete(made, blocks.encode(manifest(number, store)))
    return memory


def order(number: int, *addresses: str, budget: int | None = None) -> CopySlice:
    return CopySlice(about(number), digest(number), addresses, DEADLINE_S, budget)


def read(address: str, number: int = 0, begin: int = 0, nbytes: int = NBYTES) -> tuple[bytes, blocks.SlicesRead]:
    into = bytearray(nbytes)
    wanted = SliceRead(about(number), digest(number), address, ((begin, nbytes, 0),))
    return into, read_slices([wanted], memoryview(into), TOKEN, DEADLINE_S, {})


@contextmanager
def host(name: str) -> Iterator[tuple[BlockAgent, agent_helpers.Running]]:
    with agent_helpers.agent(0, "--name", name) as running:
        agent = BlockAgent.connect(TOKEN, 0, 0, DEADLINE_S, name)
        try:
            yield agent, running
        finally:
            agent.close()


def test_a_slice_is_written_copied_read_in_parts_and_outlives_its_writer() -> None:
    with host("a") as (first, one), host("b") as (second, two):
        assert first.address == one.address
        assert write(first) == ""
        assert second.copy(order(0, one.address)) == ""
        first.close()
        one.process.kill()
        one.process.wait(DEADLINE_S)
        into, outcome = read(two.address, begin=1500, nbytes=4000)
        assert outcome.failed == []
        assert bytes(into) == content()[1500:5500].tobytes()
        assert outcome.nbytes == 5 * PIECE, "whole pieces are read, and no more"
        (held,) = second.held(STORE, "points", DEADLINE_S)
        assert (held.slice, held.slices, held.digest) == (0, 4, digest())
        with pytest.raises(AgentGone):
            first.held(STORE, "points", DEADLINE_S)


def test_an_older_store_of_the_same_name_is_dropped_and_so_is_what_is_named() -> None:
    with host("a") as (agent, running):
        assert write(agent, store="1" * 32) == ""
        assert write(agent, 1) == ""
        assert write(agent, 2) == ""
        assert [each.slice for each in agent.held(STORE, "points", DEADLINE_S)] == [1, 2]
        assert agent.held("1" * 32, "other", DEADLINE_S) == ()
        agent.drop(STORE, [1])
        assert [each.slice for each in agent.held(STORE, "points", DEADLINE_S)] == [2]
        _, outcome = read(running.address, 1)
        ((_, why),) = outcome.failed
        assert "slice 1 (answered 404)" in why


def test_more_slices_than_a_message_has_room_for_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_HELD_SLICES", 2)
    slices, asked = SliceStore(SnapshotStore()), []
    written = {number: complete(slices, number) for number in (6, 0, 3, 9, 2)}
    slices.allocate(about(1), None)  # not complete
    written[3][0] ^= 1

    def answer(self: BlockAgent, listing: messages.ListSlices, *_: Any) -> messages.SlicesHeld:
        asked.append(listing.first)
        return messages.SlicesHeld(slices.held(listing.store, listing.name, listing.first))

    monkeypatch.setattr(BlockAgent, "_ask", answer)
    rank, agent = socket.socketpair()
    with rank, agent:
        held = BlockAgent(AgentSocket(rank, DEADLINE_S), "", DEADLINE_S).held(STORE, "points", DEADLINE_S)
    assert [each.slice for each in held] == [0, 2, 6, 9]
    assert asked == [0, 3, 10]


def test_a_copy_needs_a_source_that_has_it_and_the_next_one_is_asked() -> None:
    with host("a") as (first, one), host("b") as (second, two):
        assert "does not have slice 0" in second.copy(order(0, one.address))
        assert second.copy(order(0)) == "no source is named"
        assert write(first, 0) == ""
        assert second.copy(order(0, "127.0.0.1:9", one.address)) == ""
        assert bytes(read(two.address)[0]) == content().tobytes()


class Corrupt:
    """A source of slices that flips one bit, of the manifest or of the data."""

    def __init__(self, bit: int) -> None:
        self.slices = SliceStore(SnapshotStore())
        memory, encoded = complete(self.slices, 0), blocks.encode(manifest())
        at, mask = bit // 8, 1 << bit % 8
        if at >= len(encoded):
            memory[at - len(encoded)] ^= mask
        self.at = at if at < len(encoded) else None
        self.mask = mask

    def borrow(self, store: str, number: int) -> ServedSnapshot | None:
        served = self.slices.borrow(store, number)
        if served is None or self.at is None:
            return served
        wrong = bytearray(served.manifest)
        wrong[self.at] ^= self.mask
        return ServedSnapshot(served.fd, served.nbytes, bytes(wrong), served.digest)

    def give_back(self, served: ServedSnapshot) -> None:
        self.slices.give_back(served)


def test_a_flipped_bit_is_found_wherever_it_is() -> None:
    bits = 8 * (len(blocks.encode(manifest())) + NBYTES)
    for bit in np.random.default_rng(1).integers(0, bits, 24):
        corrupt = Corrupt(int(bit))
        server = StateServer("127.0.0.1", 0, InMemorySnapshots(), TOKEN, slices=corrupt)
        try:
            _, outcome = read(server.address)
            assert len(outcome.failed) == 1, bit
        finally:
            server.close()


def test_the_budget_counts_slices_and_copies_of_shards_together() -> None:
    snapshots = SnapshotStore()
    slices = SliceStore(snapshots)
    with pytest.raises(ValueError, match=r"10017 bytes are needed; 0 of 10000 bytes of memory\.budget_gb"):
        slices.allocate(about(), 10_000)
    made = slices.allocate(about(), 11_000)
    with pytest.raises(ValueError, match="10017 of 11000 bytes"):
        slices.allocate(about(1), 11_000)
    with pytest.raises(ValueError, match="10017 of 11000 bytes"):
        snapshots.admit_copy(1, Owner(0, 1, 500), 0, 11_000)
    slices.abandon(made)
    snapshots.admit_copy(1, Owner(0, 1, 500), 0, 11_000)
    with pytest.raises(ValueError, match="1000 of 11000 bytes"):
        slices.allocate(about(), 11_000)
    snapshots.close()


def test_a_slice_that_is_dropped_while_it_is_read_is_freed_afterwards() -> None:
    snapshots = SnapshotStore()
    slices = SliceStore(snapshots)
    complete(slices, 0, budget=11_000)
    served = slices.borrow(STORE, 0)
    assert served is not None
    slices.drop(STORE, [0, 3])
    assert attach(served.fd, NBYTES, writable=False).tobytes() == content().tobytes()
    with pytest.raises(ValueError, match="10017 of 11000"):
        slices.allocate(about(), 11_000)
    slices.give_back(served)
    slices.allocate(about(), 11_000)


@contextmanager
def silent() -> Iterator[tuple[str, Callable[[], None]]]:
    """A source that says nothing: its address, and what waits until somebody has called there."""
    with ExitStack() as stack:
        listening = stack.enter_context(socket.socket())
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        listening.settimeout(DEADLINE_S)

        def called() -> None:
            stack.enter_context(listening.accept()[0])

        yield f"127.0.0.1:{listening.getsockname()[1]}", called


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder may say nothing for a moment only."""
    monkeypatch.setattr(blocks, "SILENT_S", 0.4)


@pytest.mark.usefixtures("impatient")
def test_a_slice_that_is_dropped_while_it_is_copied_is_written_into_no_other() -> None:
    """Its descriptor stays open: else the next slice has its number, and the next source's bytes are put there."""
    there, here = SliceStore(SnapshotStore()), SliceStore(SnapshotStore())
    complete(there, 0)
    server = StateServer("127.0.0.1", 0, InMemorySnapshots(), TOKEN, slices=there)
    try:
        with silent() as (address, called), ThreadPoolExecutor(1) as pool:
            copied = pool.submit(here.copy, order(0, address, server.address), TOKEN, threading.Event())
            called()
            assert here.held("1" * 32, "points") == (), "another description of the store: the slice is dropped"
            complete(here, 3, "1" * 32)
            with pytest.raises(ValueError, match="slice 0 is not being written"):
                copied.result(DEADLINE_S)
            assert [each.slice for each in here.held("1" * 32, "points")] == [3]
    finally:
        server.close()


def test_a_copy_that_fails_late_ends_no_slice_that_is_written_meanwhile() -> None:
    snapshots = SnapshotStore()
    slices, cancel = SliceStore(snapshots), threading.Event()
    with silent() as (address, called), ThreadPoolExecutor(1) as pool:
        copied = pool.submit(slices.copy, order(0, address), TOKEN, cancel)
        called()
        made = slices.allocate(about(), None)  # by the next life of the rank
        attach(made.fd, NBYTES, writable=True)[:] = content()
        cancel.set()
        with pytest.raises(ValueError, match="not here within"):
            copied.result(DEADLINE_S)
        slices.complete(made, blocks.encode(manifest()))
        assert [each.slice for each in slices.held(STORE, "points")] == [0]
    with pytest.raises(ValueError, match="10017 of 11000 bytes"):
        slices.allocate(about(1), 11_000)
    slices.drop(STORE, [0])
    slices.allocate(about(1), 11_000)  # the memory of both is free


def test_a_copy_that_is_dropped_when_it_is_here_leaves_nothing() -> None:
    there, here = SliceStore(SnapshotStore()), SliceStore(SnapshotStore())
    complete(there, 0)
    server = StateServer("127.0.0.1", 0, InMemorySnapshots(), TOKEN, slices=there)
    asked = order(0, server.address, budget=11_000)
    try:
        dropped = threading.Event()

        def drops(*arguments: Any) -> blocks.SlicesRead:
            found = read_slices(*arguments)
            if not dropped.is_set():
                dropped.set()
                here.drop(STORE, [0])
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(blocks, "read_slices", drops)
            with pytest.raises(ValueError, match="slice 0 is not being written"):
                here.copy(asked, TOKEN, threading.Event())
            here.copy(asked, TOKEN, threading.Event())  # its memory was freed
    finally:
        server.close()


async def test_the_copy_of_a_rank_that_is_gone_ends_at_once() -> None:
    slices = SliceStore(SnapshotStore())
    rank, agent = socket.socketpair()
    agent.setblocking(False)
    with agent, silent() as (address, called):
        session = asyncio.create_task(BlockSession(AgentConnection(agent), slices, TOKEN).run())
        rank.sendall(messages.frame(replace(order(0, *[address] * 8), deadline_s=1e5)))
        await asyncio.to_thread(called)
        rank.close()
        with pytest.raises(OSError):  # noqa: PT011 - which one depends on who notices first
            await asyncio.wait_for(session, blocks.SILENT_S / 2)
    slices.allocate(about(), NBYTES)  # its memory is free


async def test_a_rank_may_order_before_it_is_answered() -> None:
    slices = SliceStore(SnapshotStore())
    complete(slices, 2)
    rank, agent = socket.socketpair()
    agent.setblocking(False)
    with agent:
        session = asyncio.create_task(BlockSession(AgentConnection(agent), slices, TOKEN).run())
        listing = messages.frame(messages.ListSlices(STORE, "points"))
        rank.sendall(listing + messages.frame(DropSlices(STORE, (2,))) + listing)
        end = AgentConnection(rank)
        rank.setblocking(False)
        answers = [messages.decode(await end.read(1 << 16), messages.SlicesHeld, Done) for _ in range(3)]
        assert [len(each.held) if isinstance(each, messages.SlicesHeld) else None for each in answers] == [
            1,
            None,
            0,
        ]
        rank.close()
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(session, DEADLINE_S)


@pytest.mark.usefixtures("impatient")
def test_a_holder_that_says_nothing_is_given_up() -> None:
    with silent() as (address, _):
        _, outcome = read(address)
        assert [why for _, why in outcome.failed] == ["nothing within 0.4 s"]
        cancel = threading.Event()
        cancel.set()
        wanted = SliceRead(about(), digest(), address, ())
        failed = read_slices([wanted], memoryview(b""), TOKEN, DEADLINE_S, {}, cancel).failed
        assert [each for each, _ in failed] == [wanted]


@pytest.mark.usefixtures("impatient")
def test_a_piece_that_takes_longer_than_a_holder_may_be_silent_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of hundreds of MB is one piece: what counts is that some of it arrives."""
    monkeypatch.setattr(blocks, "PART_BYTES", 16 << 10)
    whole = np.random.default_rng(2).integers(0, 256, 300_000, dtype=np.uint8)
    large = SliceName(STORE, "points", 0, 4, len(whole), len(whole))
    encoded = blocks.encode(SliceManifest(large, blocks.sums_of(whole.data, len(whole))))
    slices, into = SliceStore(SnapshotStore()), bytearray(len(whole))
    made = slices.allocate(large, None)
    attach(made.fd, len(whole), writable=True)[:] = whole
    slices.complete(made, encoded)
    server = StateServer("127.0.0.1", 0, InMemorySnapshots(), TOKEN, slices=slices)
    try:
        with ThrottledLinks([server.address], 400e3) as links:
            asked = SliceRead(large, blocks.digest_of(encoded), links.addresses[0], ((0, len(whole), 0),))
            outcome = read_slices([asked], memoryview(into), TOKEN, DEADLINE_S, {})
        assert (outcome.failed, outcome.nbytes) == ([], len(whole))
        assert bytes(into) == whole.tobytes()
    finally:
        server.close()


def test_a_stranger_gives_no_order_reads_no_byte_and_is_no_source() -> None:
    other = "0" * len(TOKEN)
    slices = SliceStore(SnapshotStore())
    complete(slices, 1)
    server = StateServer("127.0.0.1", 0, InMemorySnapshots(), other, slices=slices)
    try:
        with host("a") as (agent, running):
            assert write(agent) == ""
            with socket.socket(socket.AF_UNIX) as sock:
                connect_newest(sock, TOKEN, 0, "a")  # who finds the socket knows no token by that
                sock.settimeout(DEADLINE_S)
                with pytest.raises(HungUp):
                    call_blocking(sock, other, Purpose.AGENT)
            into = bytearray(NBYTES)
            wanted = SliceRead(about(), digest(), running.address, ((0, NBYTES, 0),))
            outcome = read_slices([wanted], memoryview(into), other, 0.3, {})
            assert (len(outcome.failed), outcome.nbytes, any(into)) == (1, 0, False)
            assert "not here within" in agent.copy(replace(order(1, server.address), deadline_s=0.3))
            again = BlockAgent.connect(TOKEN, 0, 1, DEADLINE_S, "a")
            with pytest.raises(AgentGone):
                again.drop("no digest", [0])
            assert [each.slice for each in agent.held(STORE, "points", DEADLINE_S)] == [0]
    finally:
        server.close()


def test_a_holder_that_has_no_place_is_asked_again_also_by_a_reader_that_knows_the_manifest(monkeypatch) -> None:
    connect, refused = DonorConnection.ask, 0

    def busy(self: DonorConnection, path: str, span: tuple[int, int] | None = None) -> Answer:
        nonlocal refused
        if refused < 3:
            refused += 1
            raise DonorBusy("no place")
        return connect(self, path, span)

    with host("a") as (agent, running):
        assert write(agent) == ""
        known = {digest(): (manifest(), blocks.encode(manifest()))}
        into = bytearray(NBYTES)
        wanted = SliceRead(about(), digest(), running.address, ((0, NBYTES, 0),))
        monkeypatch.setattr(DonorConnection, "ask", busy)
        assert read_slices([wanted], memoryview(into), TOKEN, DEADLINE_S, known).failed == []
        assert bytes(into) == content().tobytes()


@pytest.mark.parametrize(
    "encoded",
    [
        b"",
        b"0" * 64 + b"\n{}",
        blocks.encode(manifest())[:-1],
        blocks.encode(SliceManifest(about(), b"12345678")),
        blocks.encode(SliceManifest(about(number=9, store="x"), b"")),
    ],
)
def test_a_manifest_that_is_none_is_refused(encoded: bytes) -> None:
    with pytest.raises(DataCorruption):
        blocks.decode(encoded)

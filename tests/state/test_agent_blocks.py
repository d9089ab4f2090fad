"""Slices of block stores in state agents: agents as processes where one dies, else in this one."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ft_hsdp.errors import DataCorruption
from ft_hsdp.handshake import HungUp, Purpose, call_blocking
from ft_hsdp.state.agent import messages
from ft_hsdp.state.agent.client import AgentGone, AgentSocket, BlockAgent
from ft_hsdp.state.agent.copies import CopyFetcher
from ft_hsdp.state.agent.messages import Done, DropSlices, Hello, KeepCopy, Welcome
from ft_hsdp.state.agent.session import AgentConnection, Session
from ft_hsdp.state.agent.shard import Owner
from ft_hsdp.state.agent.starter import connect_newest
from ft_hsdp.state.agent.store import SnapshotStore
from ft_hsdp.state.pacing import Pacer
from ft_hsdp.state.shared_memory import ServedSnapshot, attach
from ft_hsdp.state.transfer import blocks, fetch, shard_manifest
from ft_hsdp.state.transfer.blocks import SliceRead, read_slices
from ft_hsdp.state.transfer.donor_connection import Answer, DonorBusy, DonorConnection
from ft_hsdp.state.transfer.http import StateServer
from ft_hsdp.state.transfer.shard_manifest import SliceManifest, SliceName
from tests.support.state import agent_helpers
from tests.support.state.agent_helpers import DEADLINE_S, TOKEN
from tests.support.tcp_proxy import Proxies

STORE = "5" * 32
OLDER = "1" * 32  # another description of it
PIECE = 1000
NBYTES = 10 * PIECE + 17


def about(number: int = 0, store: str = STORE) -> SliceName:
    return SliceName(store, "points", number, 4, NBYTES, PIECE)


def content(number: int = 0) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, NBYTES, dtype=np.uint8)


def manifest(number: int = 0, store: str = STORE) -> SliceManifest:
    return SliceManifest(about(number, store), shard_manifest.checksums(content(number).data, chunk=PIECE))


def encoded(number: int = 0, store: str = STORE) -> bytes:
    return shard_manifest.encode(manifest(number, store))


def write(agent: BlockAgent, number: int = 0, store: str = STORE) -> str:
    memory = agent.write(about(number, store), None, DEADLINE_S)
    if isinstance(memory, str):
        return memory
    memory[:] = content(number)
    del memory
    return agent.written(about(number, store), encoded(number, store))


def begun(slices: SnapshotStore, wanted: SliceName, budget: int | None = None) -> tuple[int, np.ndarray]:
    """The slot of a slice that is to be written, and its memory."""
    key = slices.admit_slice(wanted, budget)
    slot = slices.allocate(key, wanted.store, copy=True)
    assert slot is not None
    return slot, slices.writable(key, slot)


def complete(slices: SnapshotStore, number: int = 0, store: str = STORE, budget: int | None = None) -> np.ndarray:
    slot, memory = begun(slices, about(number, store), budget)
    memory[:] = content(number)
    slices.staged((store, number), store, encoded(number, store), slot)
    return memory


def held(slices: SnapshotStore, store: str = STORE) -> list[int]:
    return [each.slice for each in slices.slices(store, "points")]


def order(number: int, *addresses: str, deadline_s: float = DEADLINE_S) -> KeepCopy:
    return KeepCopy(about(number), addresses, deadline_s, digest=shard_manifest.digest(encoded(number)))


def read(
    address: str, number: int = 0, begin: int = 0, nbytes: int = NBYTES, token: str = TOKEN, **more: Any
) -> tuple[bytearray, blocks.SlicesRead]:
    into = bytearray(nbytes)
    wanted = SliceRead(about(number), shard_manifest.digest(encoded(number)), address, ((begin, nbytes, 0),))
    arguments = {"deadline_s": DEADLINE_S, "known": {}, **more}
    return into, read_slices([wanted], memoryview(into), token, **arguments)


@contextmanager
def served(source: Any, token: str = TOKEN) -> Iterator[str]:
    with closing(StateServer("127.0.0.1", 0, source, token)) as server:
        yield server.address


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
        assert "does not have it" in second.keep(order(0, one.address))
        assert second.keep(order(0)) == "there are no donors"
        assert write(first) == ""
        assert second.keep(order(0, "127.0.0.1:9", one.address)) == "", "the other source has it"
        first.close()
        one.process.kill()
        one.process.wait(DEADLINE_S)
        into, outcome = read(two.address, begin=1500, nbytes=4000)
        assert outcome.failed == []
        assert bytes(into) == content()[1500:5500].tobytes()
        assert outcome.nbytes == 5 * PIECE, "whole pieces are read, and no more"
        (row,) = second.held(STORE, "points", DEADLINE_S)
        assert (row.slice, row.slices, row.digest) == (0, 4, shard_manifest.digest(encoded()))
        with pytest.raises(AgentGone):
            first.held(STORE, "points", DEADLINE_S)


def test_an_older_store_of_the_same_name_is_dropped_and_so_is_what_is_named() -> None:
    slices = SnapshotStore()
    for number, store in ((0, OLDER), (1, STORE), (2, STORE)):
        complete(slices, number, store)
    assert held(slices) == [1, 2]
    assert slices.borrow(OLDER, 0) is None
    assert slices.slices(OLDER, "other") == ()
    slices.drop_slices(STORE, [1, 3])
    complete(slices, 3)[0] ^= 1
    begun(slices, about(1))  # not complete
    assert held(slices) == [2], "what is damaged is dropped"
    assert slices.held() == (), "slices are no shards"


class Corrupt(SnapshotStore):
    """A source of slices that flips one bit, of the manifest or of the data."""

    def __init__(self, bit: int) -> None:
        super().__init__()
        memory, (self.at, self.mask) = complete(self), (bit // 8, 1 << bit % 8)
        if self.at >= len(encoded()):
            memory[self.at - len(encoded())] ^= self.mask

    def borrow(self, *arguments: Any, **more: Any) -> ServedSnapshot | None:
        lent = super().borrow(*arguments, **more)
        if lent is None or self.at >= len(lent.manifest):
            return lent
        wrong = bytearray(lent.manifest)
        wrong[self.at] ^= self.mask
        return replace(lent, manifest=bytes(wrong))


def test_a_flipped_bit_is_found_wherever_it_is() -> None:
    bits = 8 * (len(encoded()) + NBYTES)
    for bit in np.random.default_rng(1).integers(0, bits, 24):
        with served(Corrupt(int(bit))) as address:
            assert len(read(address)[1].failed) == 1, bit


def test_a_slice_that_is_not_the_one_that_was_agreed_on_is_not_read() -> None:
    slices = SnapshotStore()
    slot, memory = begun(slices, about())
    memory[:] = content(1)
    slices.staged((STORE, 0), STORE, shard_manifest.encode(replace(manifest(1), about=about())), slot)
    assert held(slices) == [0], "it is right for itself"
    with served(slices) as address:
        into, outcome = read(address)
    assert ["another slice 0" in why for _, why in outcome.failed] == [True]
    assert not any(into)


def test_the_budget_counts_slices_and_copies_of_shards_together() -> None:
    slices = SnapshotStore()
    with pytest.raises(ValueError, match=r"10017 bytes are needed; 0 of 10000 bytes of memory\.budget_gb"):
        slices.admit_slice(about(), 10_000)
    slot, _ = begun(slices, about(), 11_000)
    with pytest.raises(ValueError, match="10017 of 11000 bytes"):
        slices.admit_slice(about(1), 11_000)
    with pytest.raises(ValueError, match="10017 of 11000 bytes"):
        slices.admit_copy(1, Owner(0, 1, 500), 0, 11_000)
    slices.abandon((STORE, 0), slot)
    slices.admit_copy(1, Owner(0, 1, 500), 0, 11_000)
    with pytest.raises(ValueError, match="1000 of 11000 bytes"):
        slices.admit_slice(about(), 11_000)


def test_a_slice_that_is_dropped_while_it_is_read_is_freed_afterwards() -> None:
    slices = SnapshotStore()
    complete(slices, budget=11_000)
    lent = slices.borrow(STORE, 0)
    assert lent is not None
    slices.drop_slices(STORE, [0])
    assert attach(lent.fd, NBYTES, writable=False).tobytes() == content().tobytes()
    with pytest.raises(ValueError, match="10017 of 11000"):
        slices.admit_slice(about(), 11_000)
    complete(slices)  # with more memory its successor need not wait for the reader
    slices.drop_slices(STORE, [0])
    slices.give_back(lent)
    begun(slices, about(), 11_000)


@contextmanager
def silent() -> Iterator[tuple[str, Callable[[], None]]]:
    """A source that says nothing: its address, and what waits until somebody has called there."""
    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listening.settimeout(DEADLINE_S)
        yield f"127.0.0.1:{listening.getsockname()[1]}", lambda: stack.enter_context(listening.accept()[0])


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder may say nothing for a moment only."""
    monkeypatch.setattr(blocks, "SILENT_S", 1.5)
    monkeypatch.setattr(fetch, "CHUNK_S", 1.5)


@pytest.mark.usefixtures("impatient")
def test_a_slice_that_is_dropped_while_it_is_copied_is_written_into_no_other() -> None:
    there, here = SnapshotStore(), SnapshotStore()
    complete(there)
    copies = CopyFetcher(here, TOKEN)
    with served(there) as other, silent() as (address, called), ThreadPoolExecutor(1) as pool:
        copied = pool.submit(copies.keep, 0, order(0, address, other))
        called()
        assert held(here, OLDER) == [], "another description of the store: the slice is dropped"
        complete(here, 3, OLDER)
        with pytest.raises(ValueError, match="dropped meanwhile"):
            copied.result(DEADLINE_S)
        assert held(here, OLDER) == [3]


def test_a_copy_that_fails_late_ends_no_slice_that_is_written_meanwhile() -> None:
    slices, cancel = SnapshotStore(), threading.Event()
    copies = CopyFetcher(slices, TOKEN)
    with silent() as (address, called), ThreadPoolExecutor(1) as pool:
        copied = pool.submit(copies.keep, 0, order(0, address), cancel)
        called()
        slot, memory = begun(slices, about())  # by the next life of the rank
        memory[:] = content()
        cancel.set()
        with pytest.raises(ValueError, match="Cancelled"):
            copied.result(DEADLINE_S)
        slices.staged((STORE, 0), STORE, encoded(), slot)
        assert held(slices) == [0]
    with pytest.raises(ValueError, match="10017 of 11000 bytes"):
        slices.admit_slice(about(1), 11_000)
    slices.drop_slices(STORE, [0])
    begun(slices, about(1), 11_000)  # the memory of both is free


@contextlib.asynccontextmanager
async def session(slices: SnapshotStore) -> AsyncIterator[socket.socket]:
    """The rank's end of a connection for blocks. When it hangs up, the agent's end ends at once."""
    rank, agent = socket.socketpair()
    agent.setblocking(False)
    hello, copies = Hello(0, 1, 0, "blocks"), CopyFetcher(slices, TOKEN)
    with agent:
        serving = asyncio.create_task(Session(AgentConnection(agent), hello, slices, copies, Pacer()).run("here"))
        line = AgentSocket(rank, time.monotonic() + DEADLINE_S)
        assert messages.decode(await asyncio.to_thread(line.read, 1 << 16), Welcome) == Welcome("here")
        yield rank
        rank.close()
        with pytest.raises(OSError):  # noqa: PT011 - which one depends on who notices first
            await asyncio.wait_for(serving, blocks.SILENT_S / 2)


async def test_the_copy_of_a_rank_that_is_gone_ends_at_once() -> None:
    slices = SnapshotStore()
    with silent() as (address, called):
        async with session(slices) as rank:
            rank.sendall(messages.frame(order(0, *[address] * 8, deadline_s=1e5)))
            await asyncio.to_thread(called)
    begun(slices, about(), NBYTES)  # its memory is free


async def test_a_rank_may_order_before_it_is_answered() -> None:
    slices = SnapshotStore()
    complete(slices, 2)
    async with session(slices) as rank:
        listing = messages.frame(messages.ListSlices(STORE, "points"))
        rank.sendall(listing + messages.frame(DropSlices(STORE, (2,))) + listing)
        end = AgentConnection(rank)
        rank.setblocking(False)
        answers = [messages.decode(await end.read(1 << 16), messages.SlicesHeld, Done) for _ in range(3)]
    assert [len(each.held) if isinstance(each, messages.SlicesHeld) else None for each in answers] == [1, None, 0]


@pytest.mark.usefixtures("impatient")
def test_a_holder_that_says_nothing_is_given_up() -> None:
    with silent() as (address, _):
        assert [why for _, why in read(address)[1].failed] == ["nothing within 1.5 s"]


@pytest.mark.usefixtures("impatient")
def test_a_piece_that_takes_longer_than_a_holder_may_be_silent_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of hundreds of MB is one piece: what counts is that some of it arrives."""
    monkeypatch.setattr(fetch, "PART_BYTES", 16 << 10)
    whole = np.random.default_rng(2).integers(0, 256, 300_000, dtype=np.uint8)
    large = SliceName(STORE, "points", 0, 4, len(whole), len(whole))
    header = shard_manifest.encode(SliceManifest(large, shard_manifest.checksums(whole.data, chunk=len(whole))))
    slices, into = SnapshotStore(), bytearray(len(whole))
    slot, memory = begun(slices, large)
    memory[:] = whole
    slices.staged((STORE, 0), STORE, header, slot)
    with served(slices) as address, Proxies() as proxies:
        link = proxies.add(address, 150e3).address
        asked = SliceRead(large, shard_manifest.digest(header), link, ((0, len(whole), 0),))
        outcome = read_slices([asked], memoryview(into), TOKEN, DEADLINE_S, {})
    assert (outcome.failed, outcome.nbytes) == ([], len(whole))
    assert bytes(into) == whole.tobytes()


def test_a_stranger_gives_no_order_reads_no_byte_and_is_no_source() -> None:
    other = "0" * len(TOKEN)
    slices = SnapshotStore()
    complete(slices, 1)
    with host("a") as (agent, running), served(slices, other) as foreign:
        assert write(agent) == ""
        with socket.socket(socket.AF_UNIX) as sock:
            connect_newest(sock, TOKEN, 0, "a")  # who finds the socket knows no token by that
            sock.settimeout(DEADLINE_S)
            with pytest.raises(HungUp):
                call_blocking(sock, other, Purpose.AGENT)
        into, outcome = read(running.address, token=other, deadline_s=0.3)
        assert (len(outcome.failed), outcome.nbytes, any(into)) == (1, 0, False)
        assert "within 0.3 s" in agent.keep(order(1, foreign, deadline_s=0.3))
        again = BlockAgent.connect(TOKEN, 0, 1, DEADLINE_S, "a")
        with pytest.raises(AgentGone):
            again.order(DropSlices("no digest", (0,)))
        assert [each.slice for each in agent.held(STORE, "points", DEADLINE_S)] == [0]


def test_a_holder_that_has_no_place_is_asked_again_also_by_a_reader_that_knows_the_manifest(monkeypatch) -> None:
    connect, refused = DonorConnection.ask, 0

    def busy(self: DonorConnection, path: str, span: tuple[int, int] | None = None) -> Answer:
        nonlocal refused
        if refused < 3:
            refused += 1
            raise DonorBusy("no place")
        return connect(self, path, span)

    slices = SnapshotStore()
    complete(slices)
    monkeypatch.setattr(DonorConnection, "ask", busy)
    with served(slices) as address:
        known = {shard_manifest.digest(encoded()): (manifest(), encoded())}
        into, outcome = read(address, known=known)
    assert outcome.failed == []
    assert bytes(into) == content().tobytes()


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        shard_manifest.encode(replace(manifest(), checksums=("0" * 16,))),
        shard_manifest.encode(replace(manifest(), checksums=("x" * 16,) * 11)),
        encoded(store="x"),
    ],
)
def test_a_manifest_that_is_none_is_refused(wrong: bytes) -> None:
    with pytest.raises(DataCorruption):
        shard_manifest.decode(wrong, SliceManifest)

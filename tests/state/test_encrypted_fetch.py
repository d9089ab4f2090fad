import threading
from collections.abc import Iterator

import pytest

from ft_hsdp import record_layer
from ft_hsdp.state.shared_memory import InMemorySnapshots
from ft_hsdp.state.transfer.fetch import Donor, FetchedShard, FetchRequest, fetch
from ft_hsdp.state.transfer.http import StateServer
from ft_hsdp.state.transfer.shard_manifest import ExpectedShard
from tests.support.state.state_helpers import TOKEN
from tests.support.state.state_helpers import sealed as sealed_state


@pytest.fixture(autouse=True)
def _on() -> Iterator[None]:
    record_layer.use("on")
    yield
    record_layer.use("auto")


def test_an_encrypted_fetch_is_the_same_bit_by_bit() -> None:
    shot, _ = sealed_state(size=700_000)
    source = InMemorySnapshots()
    source.put(shot.manifest, shot.room)
    server = StateServer("127.0.0.1", 0, source, TOKEN)
    m = shot.manifest
    into, told = bytearray(m.nbytes), []
    try:
        wanted = FetchRequest.exactly(
            ExpectedShard(m.state, m.rank, m.ranks, m.layout, m.nbytes), memoryview(into)
        )
        got = fetch(
            [Donor(0, server.address)], wanted, TOKEN, 10.0, threading.Event(), lambda *each: told.append(each)
        )
    finally:
        server.close()
    assert told == []
    assert isinstance(got, FetchedShard)
    assert bytes(into) == bytes(shot.data)

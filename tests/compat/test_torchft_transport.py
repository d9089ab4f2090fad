"""StateTransport: torchft's own test of transports, all kinds of state dicts, damage, a Manager that heals."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import TestCase

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torchft.checkpointing.transport_test import run_multi_recovery_test

from ft_hsdp.compat.torchft import StateTransport
from ft_hsdp.compat.torchft.transport import MAX_DEPTH, flatten, unflatten
from ft_hsdp.errors import DataCorruption, InvalidArgument
from ft_hsdp.state.shared_memory import InMemorySnapshots
from ft_hsdp.state.transfer import shard_manifest
from ft_hsdp.state.transfer.http import StateServer

SOON = timedelta(seconds=10)


@pytest.fixture
def transport() -> Iterator[StateTransport[Any]]:
    made: StateTransport[Any] = StateTransport(host="127.0.0.1")
    yield made
    made.shutdown()


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield DeviceMesh("cpu", [0], mesh_dim_names=("shard",))
    dist.destroy_process_group()


def through(transport: StateTransport[Any], state: Any, step: int = 1) -> Any:
    transport.send_checkpoint([1], step, state, SOON)
    return transport.recv_checkpoint(0, transport.metadata(), step, SOON)


def test_torchfts_own_test_of_transports() -> None:
    case = TestCase()
    chunks = iter((0, 3))

    def init(rank: int, size: int) -> StateTransport[Any]:
        """As torchft's own test makes its HTTPTransport."""
        return StateTransport(timeout=SOON, num_chunks=next(chunks, 0), host="127.0.0.1")

    run_multi_recovery_test(case, init, torch.device("cpu"))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"timeout": timedelta(0)}, "timeout: got 0:00:00; allowed: more"),
        ({"num_chunks": -1}, "num_chunks: got -1"),
    ],
)
def test_arguments_that_cannot_be_are_one_clear_line(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{said}"):
        StateTransport(**wrong, host="127.0.0.1")


def test_a_state_dict_of_all_kinds_arrives_bit_by_bit(transport: StateTransport[Any]) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64]
    state: dict[str, Any] = {
        "user": {f"{d}": (torch.arange(7) % 2).to(d) for d in dtypes},
        "optim": {"state": {0: {"step": torch.tensor(3.0), "empty": torch.empty(0, 4)}}, 1.5: None, True: "yes"},
        "strided": torch.arange(12).view(3, 4).t()[1:],
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "nested": [1, (2.5, "x", [None, True, ()]), -(2**70), "\\ \u00e9 \U0001f600"],
        "floats": [math.inf, -math.inf, 5e-324, 0.1, -0.0],
    }
    got = through(transport, state)
    torch.testing.assert_close(got["user"], state["user"], rtol=0, atol=0)
    assert [t.dtype for t in got["user"].values()] == dtypes
    assert got["optim"][1.5] is None
    assert got["optim"][True] == "yes"
    assert got["optim"]["state"][0]["step"].shape == ()
    assert got["optim"]["state"][0]["empty"].shape == (0, 4)
    assert torch.equal(got["strided"], state["strided"])
    assert torch.equal(got["parameter"], state["parameter"])
    assert got["nested"] == state["nested"]
    assert [x.hex() for x in got["floats"]] == [x.hex() for x in state["floats"]]
    assert math.isnan(through(transport, {"nan": math.nan})["nan"])


def test_a_sharded_tensor_arrives_where_it_can_be_loaded(transport: StateTransport[Any], mesh: DeviceMesh) -> None:
    for placement in (Shard(0), Shard(1), Replicate()):
        sent = distribute_tensor(torch.randn(3, 4), mesh, [placement])
        got = through(transport, {"w": sent})["w"]
        assert isinstance(got, DTensor)
        assert (got.placements, got.device_mesh, got.shape) == (sent.placements, sent.device_mesh, sent.shape)
        live = distribute_tensor(torch.zeros(3, 4), mesh, [placement])
        live.copy_(got)
        assert torch.equal(live.to_local(), sent.to_local())


@pytest.mark.parametrize(
    "odd",
    [
        object(),
        {1, 2},
        b"bytes",
        {"a": [1, {"b": lambda: 0}]},
        {(1, 2): 3},
        "\ud800",
        torch.eye(3).to_sparse(),
        torch.empty(3, device="meta"),
    ],
)
def test_what_cannot_be_sent_is_named(transport: StateTransport[Any], odd: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"state_dict\['x'\].*cannot be sent"):
        transport.send_checkpoint([1], 1, {"x": odd}, SOON)


def test_as_deep_as_allowed_and_deeper(transport: StateTransport[Any]) -> None:
    deep: Any = 1
    for _ in range(MAX_DEPTH):
        deep = {"a": deep}
    assert through(transport, deep) == deep
    with pytest.raises(InvalidArgument, match="deeper"):
        flatten([deep])


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
KEYS = st.text(max_size=3) | st.integers() | st.booleans() | st.none()


@given(
    st.recursive(
        LEAVES,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(KEYS, inner, max_size=3)
        ),
        max_leaves=10,
    )
)
def test_any_tree_comes_back(value: Any) -> None:
    node, tensors = flatten(value)
    got = unflatten(json.loads(json.dumps(node)), tensors)
    assert repr(got) == repr(value)


NODES = st.recursive(
    LEAVES | st.sampled_from(["float", "list", "tuple", "dict", "tensor", "dtensor", "shard", "cpu"]),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=20,
)


@given(NODES | st.lists(NODES, max_size=7).map(lambda rest: ["dtensor", 0, *rest]))
def test_junk_is_only_ever_data_corruption(node: Any) -> None:
    try:
        unflatten(node, [torch.zeros(2)])
    except DataCorruption:
        return


def test_a_step_that_is_not_offered_times_out(transport: StateTransport[Any]) -> None:
    transport.send_checkpoint([1], 4, {"a": 1}, SOON)
    with pytest.raises(TimeoutError, match="timed out: step 3"):
        transport.recv_checkpoint(0, transport.metadata(), 3, timedelta(milliseconds=10))
    transport.disallow_checkpoint()
    assert transport.recv_checkpoint(0, transport.metadata(), 4, SOON) == {"a": 1}, "whoever is late gets it too"
    transport.send_checkpoint([1], 5, {"a": 2}, SOON)
    with pytest.raises(TimeoutError):
        transport.recv_checkpoint(0, transport.metadata(), 4, timedelta(milliseconds=10))


def test_what_is_sent_is_a_copy_and_may_change_at_once(transport: StateTransport[Any]) -> None:
    weights = torch.zeros(5)
    transport.send_checkpoint([1], 1, {"w": weights}, SOON)
    weights.fill_(1)
    first = transport.recv_checkpoint(0, transport.metadata(), 1, SOON)
    transport.send_checkpoint([1], 1, {"w": weights}, SOON)
    again = transport.recv_checkpoint(0, transport.metadata(), 1, SOON)
    assert (first["w"].sum(), again["w"].sum()) == (0, 5)


def test_nothing_without_the_token_and_no_other_metadata(transport: StateTransport[Any]) -> None:
    transport.send_checkpoint([1], 1, {"a": 1}, SOON)
    told = json.loads(transport.metadata())
    with pytest.raises(TimeoutError, match="refuses connections from here with this token"):
        transport.recv_checkpoint(0, json.dumps({**told, "token": "0"}), 1, timedelta(seconds=0.2))
    for junk in ("", "http://localhost:1/checkpoint/", "{}", "[]", '{"addresses": [], "token": "x"}'):
        with pytest.raises(DataCorruption, match="metadata"):
            transport.recv_checkpoint(0, junk, 1, SOON)


def test_gone(transport: StateTransport[Any]) -> None:
    told = transport.metadata()
    transport.shutdown()
    with pytest.raises(ConnectionError, match="was not received"):
        transport.recv_checkpoint(0, told, 1, SOON)


@pytest.mark.parametrize(
    "lie",
    [
        {"hyper": ({"tree": ["tensor", 1]},)},
        {"hyper": ({},)},
        {"hyper": ()},
        {"dtype": "float128"},
        {"shape": (2**40,)},
        {"nbytes": 2},
    ],
)
def test_a_donor_that_lies_is_not_believed(lie: dict[str, Any], transport: StateTransport[Any]) -> None:
    transport.send_checkpoint([1], 1, {"w": torch.ones(1)}, SOON)
    (served,) = transport._snapshots._held.values()
    honest = shard_manifest.decode(served.manifest)
    tensor = replace(honest.tensors[0], **{k: v for k, v in lie.items() if k != "hyper"})
    tensors = (tensor,)
    changed = replace(
        honest, tensors=tensors, layout=shard_manifest.fingerprint(tensors), hyper=lie.get("hyper", honest.hyper)
    )
    source = InMemorySnapshots()
    source.put(changed, served.room)
    token = json.loads(transport.metadata())["token"]
    liar = StateServer("127.0.0.1", 0, source, token)
    told = json.dumps({"addresses": [liar.address], "token": token})
    try:
        with pytest.raises((ConnectionError, DataCorruption)):
            transport.recv_checkpoint(0, told, 1, SOON)
    finally:
        liar.close()

import contextlib
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from ft_hsdp.core.commit import CommitRecord, Contribution
from ft_hsdp.core.ledger import Ledger
from ft_hsdp.core.state_id import SLICES, StateId
from ft_hsdp.errors import DataCorruption
from ft_hsdp.state.replica_group import ReplicaGroup
from ft_hsdp.state.shared_memory import Bytes
from ft_hsdp.state.transfer import shard_manifest
from ft_hsdp.state.transfer.shard_manifest import ShardManifest
from ft_hsdp.train import device
from ft_hsdp.train.fsdp.adopted_model import AdoptedModel, shard
from ft_hsdp.train.optimizer.creation import create_state
from ft_hsdp.train.optimizer.groups import Groups
from ft_hsdp.train.state import live_state
from ft_hsdp.train.state.live_state import LiveState, Offload
from ft_hsdp.train.state.packing import local, state_digest
from tests.support.state.odd_model import Odd

START = StateId(0, 0, "0" * 32)


def hold(
    mesh: DeviceMesh, seed: int = 0, state: StateId | None = START, offload: bool = False, model: Odd | None = None
) -> tuple[LiveState, AdoptedModel]:
    """A replica of one rank that holds ``state``, of a job with two data shards."""
    model = model or Odd(seed)
    shard(model, list(model.parts), mesh)
    sharded = AdoptedModel(model, 1, lambda *_: None)
    optimizer = torch.optim.AdamW(sharded.params.values(), lr=0.01)
    create_state(optimizer)
    live = LiveState(sharded, Groups(optimizer, None), Ledger.empty(2), 0, 1, offload)
    live.state = state
    return live, sharded


def test_the_digest_of_what_is_frozen_covers_nothing_else(mesh: DeviceMesh) -> None:
    model = Odd()
    model.first.requires_grad_(False)
    model.register_buffer("scale", torch.ones(2))
    model.register_buffer("cache", torch.ones(2), persistent=False)
    live, adopted = hold(mesh, model=model)
    ranks = ReplicaGroup()

    def digest() -> str:
        live.describe_frozen(ranks)
        return live.frozen_digest()

    digests = [digest()]
    assert "first" not in adopted.params
    for tensor in (adopted.params["last"].data, model.get_buffer("cache")):
        tensor += 1
        assert digest() == digests[0]
    for tensor in (model.first.data, model.get_buffer("scale")):
        tensor += 1
        digests.append(digest())
    assert len(set(digests)) == 3


def test_a_model_without_anything_frozen_has_no_digest_of_it(mesh: DeviceMesh) -> None:
    live = hold(mesh)[0]
    live.describe_frozen(ReplicaGroup())
    assert (live.frozen_digest(), live.aliases) == ("", {})


def record(prev: StateId, indices: tuple[int, ...] = (0, 0), digest: str = "d") -> CommitRecord:
    made = tuple(Contribution(r, 1, r, i) for r, i in enumerate(indices))
    return CommitRecord(1, 0, prev.step + 1, prev.lineage, (0, 1), 2, made, digest)


def sums(sharded: AdoptedModel, seed: int = 0) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=g) for n in sharded.sizes]


def steps(live: LiveState, sharded: AdoptedModel, count: int) -> list[StateId]:
    states = []
    for _ in range(count):
        assert live.state is not None
        live.apply(record(live.state, live.ledger.cursors), sums(sharded, live.state.step), 0.5)
        states.append(live.state)
    return states


def weights(sharded: AdoptedModel) -> dict[str, torch.Tensor]:
    return {n: p.full_tensor().detach().clone() for n, p in sharded.params.items()}


def test_apply_moves_weights_ledger_and_state_together(mesh: DeviceMesh) -> None:
    live, sharded = hold(mesh)
    plain = Odd()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    made, reduced = record(START), sums(sharded)
    for bucket, flat in zip(sharded.buckets, sums(sharded), strict=True):
        names = {id(p): n for n, p in sharded.params.items()}
        for param, place in zip(bucket.params, bucket.places, strict=True):
            mine = plain.get_parameter(names[id(param)])
            mine.grad = flat[place : place + mine.numel()].view(mine.shape) / 2  # two contributors
    live.apply(made, reduced, None)
    optimizer.step()
    assert live.state == made.state_id
    assert live.ledger.cursors == (1, 1)
    assert all(torch.equal(w, plain.get_parameter(n)) for n, w in weights(sharded).items())
    assert all(p.grad is None for p in sharded.params.values())


class Streams:
    """Stands for a device: writes down what its streams are told. The tensors are in host memory."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.events = 0

    def written(self, _: torch.Tensor) -> int:
        self.events += 1
        return self.events

    def stream(self, _: torch.device) -> Any:
        return SimpleNamespace(
            wait_event=lambda event: self.log.append(("wait", event)), synchronize=lambda: self.log.append("read")
        )


def test_who_reads_the_state_on_another_stream_waits_for_the_update(mesh: DeviceMesh) -> None:
    """Under a stream of the user's own, a copy would else be torn, and its checksums would be right."""
    streams = Streams()
    live, sharded = hold(mesh)
    into = np.empty(live.layout.nbytes, dtype=np.uint8)
    with (
        mock.patch.object(live_state, "written", streams.written),
        mock.patch.object(device, "_copies", streams.stream),
        mock.patch.object(torch.cuda, "stream", return_value=contextlib.nullcontext()),
    ):
        for step in (1, 2):
            (state,) = steps(live, sharded, 1)
            assert live.pack(state, into) is not None
            assert live.slice_digest(state.lineage)
            assert streams.log == [("wait", step), "read"] * 3, "copy, its slice, the slice of the vote"
            streams.log.clear()


def test_what_looks_at_a_slice_on_a_device_is_loaded_before_the_first_step(mesh: DeviceMesh) -> None:
    summarize = mock.Mock(return_value=lambda: ("", []))
    with mock.patch.object(live_state, "device_summaries", return_value=summarize):
        hold(mesh)
    summarize.assert_called_once()


def test_a_step_of_which_nothing_counts_changes_no_tensor(mesh: DeviceMesh) -> None:
    """Zeros are no mean of anything: momentum and weight decay would move the parameters by them."""
    live, sharded = hold(mesh)
    steps(live, sharded, 2)
    before, optim = weights(sharded), {n: t.clone() for n, t in live.optim.items()}
    assert live.state is not None
    made = record(live.state, live.ledger.cursors)
    made = replace(made, contributions=tuple(replace(c, weight=0) for c in made.contributions))
    live.apply(made, [torch.zeros(n) for n in sharded.sizes], 0.5)
    assert (live.state, live.ledger.cursors) == (made.state_id, (3, 3))
    assert all(torch.equal(w, before[n]) for n, w in weights(sharded).items())
    assert all(torch.equal(t, optim[n]) for n, t in live.optim.items())


@pytest.mark.parametrize("state", [None, replace(START, lineage="1" * 32)])
def test_a_record_that_does_not_build_on_the_state_is_refused(mesh: DeviceMesh, state: StateId | None) -> None:
    live, sharded = hold(mesh, state=state)
    before = weights(sharded)
    with pytest.raises(RuntimeError, match="does not build on"):
        live.apply(record(START), sums(sharded), None)
    assert live.state == state
    assert all(torch.equal(a, before[n]) for n, a in weights(sharded).items())


def packed(live: LiveState) -> tuple[ShardManifest, Bytes]:
    into = np.full(live.layout.nbytes, 0xFF, dtype=np.uint8)
    assert live.state is not None
    manifest = live.pack(live.state, into)
    assert manifest is not None
    return manifest, into


def test_a_flip_shows_in_the_slice_that_a_device_has_hashed(mesh: DeviceMesh, monkeypatch) -> None:
    asked: list[int] = []

    def summarize(values: torch.Tensor, spans: object) -> Any:
        asked.append(values.numel())
        return lambda: (values.view(torch.int32).numpy().tobytes().hex(), [])

    monkeypatch.setattr(live_state, "device_summaries", lambda device: summarize)
    digests = []
    for flipped in (False, True):
        live, sharded = hold(mesh)
        if flipped:
            local(sharded.params["first"])[0, 0] += 1
        digests.append([slices(live, step) for step in range(SLICES)])
    assert sum(one != other for one, other in zip(*digests, strict=True)) == 1
    assert all(numel % 4 == 0 for numel in asked)


def slices(live: LiveState, step: int) -> str:
    live.state = StateId(0, step, "0" * 32)
    return live.slice_digest("0" * 32)


@pytest.mark.parametrize("offload", [False, True])
def test_a_state_is_loaded_as_a_whole_and_goes_on_alike(mesh: DeviceMesh, offload: bool) -> None:
    one, one_sharded = hold(mesh)
    steps(one, one_sharded, 3)
    shot = packed(one)
    other, other_sharded = hold(mesh, seed=9, offload=offload)
    assert other.weights_digest() != one.weights_digest()
    other.load(*shot)
    assert (other.state, other.ledger) == (one.state, one.ledger)
    assert other.weights_digest() == one.weights_digest()
    assert steps(other, other_sharded, 2) == steps(one, one_sharded, 2)
    assert bytes(packed(other)[1]) == bytes(packed(one)[1]), "the optimizer's tensors are not all in the snapshot"
    if not offload:  # numpy pins the memory of a CPU tensor that it looks at
        assert other.digest() == one.digest()


def test_only_the_state_that_is_held_is_packed(mesh: DeviceMesh) -> None:
    live, sharded = hold(mesh)
    into = np.zeros(live.layout.nbytes, dtype=np.uint8)
    (after,) = steps(live, sharded, 1)
    assert live.pack(START, into) is None
    assert not into.any()
    manifest = live.pack(after, into)
    assert manifest is not None
    assert (manifest.state, manifest.ledger) == (after, live.ledger)
    assert manifest.checksums == shard_manifest.checksums(into.data)


def test_a_step_that_is_skipped_moves_ledger_and_name_alone(mesh: DeviceMesh) -> None:
    live, sharded = hold(mesh)
    before = weights(sharded), bytes(packed(live)[1])
    poisoned = replace(record(START), poisoned=(1,))
    after = poisoned.ledger(live.ledger)
    live.apply(poisoned, [torch.full((n,), float("nan")) for n in sharded.sizes], 0.5)
    assert live.state == poisoned.state_id
    assert live.ledger == after != Ledger.empty(2)
    assert bytes(packed(live)[1]) == before[1]


def test_a_flipped_bit_shows_in_the_digest_of_its_slice_alone(mesh: DeviceMesh) -> None:
    live, _ = hold(mesh)
    found: list[int] = []
    for number in range(SLICES):
        live.state = StateId(0, number, START.lineage)
        clean = live.slice_digest(START.lineage)
        tensor = local(list(live.optim.values())[-2])
        tensor.view(-1).view(torch.uint8)[0] ^= 1
        if live.slice_digest(START.lineage) != clean:
            found.append(number)
        tensor.view(-1).view(torch.uint8)[0] ^= 1
        assert live.slice_digest(START.lineage) == clean
    assert len(found) == 1
    assert live.slice_digest("another lineage") == ""


def test_memory_that_changes_after_the_copy_is_found_before_the_vote(mesh: DeviceMesh) -> None:
    live, sharded = hold(mesh)
    packed(live)
    clean = live.slice_digest(START.lineage)
    first = local(next(iter(sharded.params.values()))).view(-1).view(torch.uint8)
    first[0] ^= 1
    with pytest.raises(DataCorruption, match=r"slice 0 of .* changed in this rank's memory"):
        live.slice_digest(START.lineage)
    first[0] ^= 1
    assert live.slice_digest(START.lineage) == clean


def test_an_update_waits_for_a_copy(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    live, sharded = hold(mesh)
    copying, go = threading.Event(), threading.Event()
    pack, got = live_state.pack, []

    def slow(*args: Any) -> tuple[str, ...]:
        copying.set()
        assert go.wait(30)
        return pack(*args)

    want = bytes(packed(live)[1])
    monkeypatch.setattr(live_state, "pack", slow)
    copier = threading.Thread(target=lambda: got.append(packed(live)))
    copier.start()
    assert copying.wait(30)
    updater = threading.Thread(target=steps, args=(live, sharded, 1))
    updater.start()
    updater.join(0.2)
    assert live.state == START, "the update did not wait"
    go.set()
    copier.join(30)
    updater.join(30)
    assert live.state is not None
    assert live.state.step == 1
    assert bytes(got[0][1]) == want


def test_weights_that_the_loop_puts_in_for_a_while_are_neither_copied_nor_compared(mesh: DeviceMesh) -> None:
    live, sharded = hold(mesh)
    want, got = bytes(packed(live)[1]), list[Any]()
    copier = threading.Thread(target=lambda: got.append(packed(live)))
    params, copied = [local(p) for p in sharded.params.values()], mock.Mock()
    plan = mock.Mock(widths=(1,), lanes=[mock.Mock(owners=((1, 0),))])
    with live.lent(copied):
        copied.assert_called_once_with()
        for param in params:
            param.mul_(2)
        copier.start()
        copier.join(0.2)
        assert (live.slice_digest(START.lineage), live.lane_digests(plan)) == ("", [])
        for param in params:
            param.mul_(0.5)
    copier.join(30)
    assert bytes(got[0][1]) == want
    assert live.slice_digest(START.lineage)
    assert live.lane_digests(plan) != []


def test_the_loop_gets_no_state_that_is_being_compared(mesh: DeviceMesh) -> None:
    live, taken, within = hold(mesh)[0], threading.Event(), live_state.within

    def lend() -> None:
        with live.lent(mock.Mock()):
            taken.set()

    lender = threading.Thread(target=lend)

    def slow(*args: Any) -> Any:
        lender.start()
        assert not taken.wait(0.2)
        return within(*args)

    with mock.patch.object(live_state, "within", slow):
        assert live.slice_digest(START.lineage)
    lender.join(30)
    assert taken.is_set()


def test_a_step_that_is_applied_within_a_pause_is_a_state_and_its_callbacks_wait_for_no_copy(mesh) -> None:
    live, sharded = hold(mesh)
    copied = mock.Mock()

    def pauses() -> None:
        with live.lent(copied):
            pass

    live.apply(record(START), sums(sharded), 0.5, pauses)
    copied.assert_not_called()
    with live.lent(mock.Mock()):
        (state,) = steps(live, sharded, 1)
        assert live.slice_digest(state.lineage)
    pauses()
    copied.assert_called_once_with()


def test_a_step_that_a_callback_has_cut_short_is_no_state_and_holds_no_copy_up(mesh: DeviceMesh) -> None:
    live, sharded = hold(mesh)
    memory = np.empty(live.layout.nbytes, dtype=np.uint8)
    with pytest.raises(SystemExit):
        live.apply(record(START), sums(sharded), 0.5, mock.Mock(side_effect=SystemExit(3)))
    assert live.pack(START, memory) is None


def test_the_digest_knows_no_sharding_but_every_change(mesh: DeviceMesh) -> None:
    _, sharded = hold(mesh)
    plain = {n: p.detach().clone() for n, p in Odd().named_parameters()}
    hyper: tuple[dict[str, Any], ...] = ({"lr": 0.1, "betas": [0.9, 0.95]},)
    mine = state_digest(plain, {}, hyper)
    assert state_digest(sharded.params, {}, hyper) == mine
    assert state_digest(dict(reversed(plain.items())), {}, hyper) == mine, "the order of the names counts"
    first = next(iter(plain))
    flipped = plain[first].clone()
    flipped.view(torch.int32)[0, 0] ^= 1
    others = [
        state_digest(plain | {first: flipped}, {}, hyper),
        state_digest({("x" if n == first else n): t for n, t in plain.items()}, {}, hyper),
        state_digest(plain | {first: plain[first].reshape(2, 8)}, {}, hyper),
        state_digest(plain | {first: plain[first].view(torch.int32)}, {}, hyper),
        state_digest(plain, {}, ({**hyper[0], "lr": 0.2},)),
    ]
    assert len({mine, *others}) == 1 + len(others)


def test_between_updates_the_bytes_are_in_host_memory_only() -> None:
    tensors = [torch.randn(5, 3), torch.arange(7.0), torch.tensor(2.0), torch.empty(0)]
    before = [t.clone() for t in tensors]
    offload = Offload(tensors)
    assert all(t.untyped_storage().nbytes() == 0 for t in tensors)
    assert all(torch.equal(h, b) for h, b in zip(offload.host, before, strict=True))
    offload.visit()
    assert all(torch.equal(t, b) for t, b in zip(tensors, before, strict=True))
    for t in tensors:
        t.add_(1)
    offload.leave()
    assert all(torch.equal(h, b + 1) for h, b in zip(offload.host, before, strict=True))
    assert offload.lap() == offload.moved_s > 0
    assert offload.lap() == 0


def test_a_rate_that_a_callback_sets_is_part_of_the_state(mesh: DeviceMesh) -> None:
    def held() -> tuple[LiveState, AdoptedModel, Groups]:
        model = Odd()
        shard(model, list(model.parts), mesh)
        adopted = AdoptedModel(model, 1, lambda *_: None)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        create_state(optimizer)
        groups = Groups(optimizer, None)
        live = LiveState(adopted, groups, Ledger.empty(2), 0, 1)
        live.state = START
        return live, adopted, groups

    live, sharded, groups = held()
    live.apply(record(START), sums(sharded), 0.5, lambda: groups.groups[0].update(lr=0.3))
    groups.check()
    manifest, _ = packed(live)
    fresh, _, again = held()
    fresh.resumed(manifest.state, manifest.ledger, (*manifest.hyper, live.given))
    assert fresh.changes == ()
    assert again.groups[0]["lr"] == 0.3
    assert again.hyper() == groups.hyper()

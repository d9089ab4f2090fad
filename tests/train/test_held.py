from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from odd_model import Odd, batch
from torch.distributed.device_mesh import DeviceMesh

from ft_hsdp.core.commit import CommitRecord, Contribution
from ft_hsdp.core.lineage import StateId
from ft_hsdp.state import layout, snapshot
from ft_hsdp.train import held as held_module
from ft_hsdp.train.held import Held, state_digest
from ft_hsdp.train.hsdp import Sharded
from ft_hsdp.train.optim import Groups, prime

START = StateId(0, 0, "0" * 32)


def hold(mesh: DeviceMesh, seed: int = 0, state: StateId | None = START) -> tuple[Held, Sharded]:
    """A replica of one rank that holds ``state``, of a job with two data shards."""
    model = Odd(seed)
    sharded = Sharded(model, list(model.parts), mesh, lambda *_: None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    prime(optimizer)
    held = Held(sharded, Groups(optimizer, None), 2, 0, 1)
    held.state = state
    return held, sharded


def record(prev: StateId, indices: tuple[int, ...] = (0, 0), digest: str = "d") -> CommitRecord:
    made = tuple(Contribution(r, 1, r, i) for r, i in enumerate(indices))
    return CommitRecord(1, 0, prev.step + 1, prev.lineage, (0, 1), 2, made, digest)


def sums(sharded: Sharded, seed: int = 0) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=g) for n in sharded.sizes]


def steps(held: Held, sharded: Sharded, count: int) -> list[StateId]:
    """Apply steps; the states on the way."""
    states = []
    for _ in range(count):
        assert held.state is not None
        held.apply(record(held.state, held.ledger.cursors), sums(sharded, held.state.step), 0.5, 1)
        states.append(held.state)
    return states


def weights(sharded: Sharded) -> dict[str, torch.Tensor]:
    return {n: p.full_tensor().detach().clone() for n, p in sharded.params.items()}


def test_apply_moves_weights_ledger_and_state_together(mesh: DeviceMesh) -> None:
    held, sharded = hold(mesh)
    plain = Odd()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    made, reduced = record(START), sums(sharded)
    for bucket, flat in zip(sharded.buckets, sums(sharded), strict=True):
        names = {id(p): n for n, p in sharded.params.items()}
        for param, place in zip(bucket.params, bucket.places, strict=True):
            mine = plain.get_parameter(names[id(param)])
            mine.grad = flat[place : place + mine.numel()].view(mine.shape) / 2  # two contributors
    held.apply(made, reduced, None, 1)
    optimizer.step()
    assert held.state == made.state_id
    assert held.ledger.cursors == (1, 1)
    assert all(torch.equal(w, plain.get_parameter(n)) for n, w in weights(sharded).items())
    assert all(p.grad is None for p in sharded.params.values())


@pytest.mark.parametrize("state", [None, replace(START, lineage="1" * 32)])
def test_a_record_that_does_not_build_on_the_state_is_refused(mesh: DeviceMesh, state: StateId | None) -> None:
    held, sharded = hold(mesh, state=state)
    before = weights(sharded)
    with pytest.raises(RuntimeError, match="does not build on"):
        held.apply(record(START), sums(sharded), None, 1)
    assert held.state == state
    assert all(torch.equal(a, before[n]) for n, a in weights(sharded).items())


def test_a_state_is_loaded_as_a_whole_and_goes_on_alike(mesh: DeviceMesh) -> None:
    one, one_sharded = hold(mesh)
    states = steps(one, one_sharded, 3)
    one.keep()
    shot = one.snapshots.get(states[-1])
    assert shot is not None
    other, other_sharded = hold(mesh, seed=9)
    assert other.weights_digest() != one.weights_digest()
    other.load(shot)
    assert (other.state, other.ledger) == (one.state, one.ledger)
    assert other.weights_digest() == one.weights_digest()
    assert other.digest() == one.digest()
    assert steps(other, other_sharded, 2) == steps(one, one_sharded, 2)
    assert other.digest() == one.digest(), "the optimizer's tensors are not all in the snapshot"


def test_what_was_served_does_not_change_afterwards(mesh: DeviceMesh) -> None:
    held, sharded = hold(mesh)
    held.keep()
    shot = held.snapshots.get(START)
    assert shot is not None
    before = bytes(shot.data)
    steps(held, sharded, 3)
    assert bytes(shot.data) == before


def test_a_snapshot_that_is_wanted_now_before_and_later(mesh: DeviceMesh) -> None:
    held, sharded = hold(mesh)
    twin, twin_sharded = hold(mesh)
    states = steps(twin, twin_sharded, 3)
    held.want(START)
    assert held.snapshots.get(START) is None, "the control loop must not copy"
    held.keep_wanted()
    assert held.snapshots.get(START) is not None
    held.want(states[0])  # not reached yet
    held.keep_wanted()
    assert held.snapshots.get(states[0]) is None
    steps(held, sharded, 1)
    taken = held.snapshots.get(states[0])
    assert taken is not None
    assert taken.manifest.cursors == (1, 1)
    steps(held, sharded, 1)
    held.want(states[1])  # held, but nobody gets to copy it before the next step
    steps(held, sharded, 1)
    left = held.snapshots.get(states[1])
    assert left is not None, "the base was left behind without a snapshot"
    assert left.manifest.state == states[1]
    assert left.manifest.cursors == (2, 2)


def test_a_wish_while_another_is_copied_is_not_lost(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    held, sharded = hold(mesh)
    twin, twin_sharded = hold(mesh)
    (after,) = steps(twin, twin_sharded, 1)
    seal = snapshot.seal

    def slow(*args: Any) -> Any:
        if args[0] == START:
            held.want(after)
        return seal(*args)

    monkeypatch.setattr(held_module.snapshot, "seal", slow)
    held.want(START)
    held.keep_wanted()
    steps(held, sharded, 1)
    assert held.snapshots.get(START) is not None
    assert held.snapshots.get(after) is not None


def test_an_update_waits_for_a_copy(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    held, sharded = hold(mesh)
    copying, go = threading.Event(), threading.Event()
    pack = layout.pack

    def slow(*args: Any) -> None:
        copying.set()
        assert go.wait(5)
        pack(*args)

    want = bytes(memoryview(held._pack().numpy()))
    monkeypatch.setattr(held_module.layout, "pack", slow)
    held.want(START)
    copier = threading.Thread(target=held.keep_wanted)
    copier.start()
    assert copying.wait(5)
    updater = threading.Thread(target=steps, args=(held, sharded, 1))
    updater.start()
    updater.join(0.2)
    assert held.state == START, "the update did not wait"
    go.set()
    copier.join(5)
    updater.join(5)
    assert held.state is not None
    assert held.state.step == 1
    shot = held.snapshots.get(START)
    assert shot is not None
    assert bytes(shot.data) == want


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


def test_a_snapshot_of_a_model_that_trains_is_that_of_its_weights(mesh: DeviceMesh) -> None:
    """Forward and backward change nothing that is held."""
    held, sharded = hold(mesh)
    before = held.weights_digest()
    sharded.model(batch(0)).backward()
    assert held.weights_digest() == before

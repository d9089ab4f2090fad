"""Bits that flip in memory: how many are found, after how many steps, and whether it is known where.

`pytest -s -m proof tests/train/state/test_flips.py` prints the rates that docs/detection.md has.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from ft_hsdp.config import Config, parse
from ft_hsdp.core import state_id
from ft_hsdp.core.commit import CommitRecord, Contribution, outliers
from ft_hsdp.core.ledger import Ledger
from ft_hsdp.core.state_id import SLICES, StateId
from ft_hsdp.ftar.frame import Entry
from ft_hsdp.state.shared_memory import Bytes
from ft_hsdp.state.transfer import shard_manifest
from ft_hsdp.state.transfer.shard_manifest import ShardManifest
from ft_hsdp.train.fsdp.adopted_model import AdoptedModel, shard
from ft_hsdp.train.optimizer.creation import create_state
from ft_hsdp.train.optimizer.groups import Groups
from ft_hsdp.train.state.live_state import LiveState
from ft_hsdp.train.state.packing import as_bytes, local
from ft_hsdp.train.trainer import build, build_optimizer, dataset
from ft_hsdp.train.votes import checksum, square_of

pytestmark = pytest.mark.proof
REPLICAS, STEPS, FLIPS, MADS, VICTIM = 4, 32, 40, 20.0, 1
EXPONENT, OTHER, ANY = range(23, 31), (*range(23), 31), range(32)  # bits of a number in fp32


@dataclass
class Step:
    manifest: ShardManifest  # of the state before it
    packed: Bytes
    slice: str  # digest of what is compared of it
    whole: str  # digest of all of it
    gradients: list[list[torch.Tensor]]  # of each replica the buckets
    sums: list[torch.Tensor]
    record: CommitRecord


def hold(config: Config, mesh: DeviceMesh) -> tuple[LiveState, AdoptedModel, dict[int, torch.Tensor]]:
    """A replica of one rank, and where its gradient comes."""
    got: dict[int, torch.Tensor] = {}
    model = build(config)
    shard(model, model.shards(), mesh)
    adopted = AdoptedModel(model, 1, got.__setitem__)
    optimizer = build_optimizer(config, list(model.parameters()))
    create_state(optimizer)
    live = LiveState(adopted, Groups(optimizer, None), Ledger.empty(REPLICAS), 0, 1)
    live.state = StateId(0, 0, "0" * 32)
    return live, adopted, got


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    runs = str(tmp_path_factory.mktemp("runs"))
    train = {"seq_len": 32, "micro_batch": 2, "steps": STEPS}
    model = {"dim": 32, "layers": 2, "heads": 2}
    return parse({"replicas": REPLICAS, "model": model, "train": train, "job": {"runs_dir": runs}})


@pytest.fixture(scope="module")
def steps(config: Config, mesh: DeviceMesh) -> list[Step]:
    """A short training of all replicas; they are equal, so one computes for all."""
    (live, adopted, got), data, found = hold(config, mesh), dataset(config), list[Step]()
    for index in range(STEPS):
        assert live.state is not None
        gradients = []
        for replica in range(REPLICAS):
            adopted.model(data.batch(replica, index, 0)).backward()
            gradients.append([got[bucket].clone() for bucket in sorted(got)])
            adopted.clear()
        sums = [torch.stack(each).sum(0) for each in zip(*gradients, strict=True)]
        made = tuple(Contribution(r, 1, r, index) for r in range(REPLICAS))
        ring = tuple(range(REPLICAS))
        record = CommitRecord(1, 0, index + 1, live.state.lineage, ring, REPLICAS, made, checksum(torch.cat(sums)))
        into = np.zeros(live.layout.nbytes, dtype=np.uint8)
        manifest = live.pack(live.state, into)
        assert manifest is not None
        digests = live.slice_digest(record.prev), live.weights_digest()
        found.append(Step(manifest, into, *digests, gradients, sums, record))
        live.apply(record, [each.clone() for each in sums], 1.0)
    return found


def flip(tensors: Sequence[torch.Tensor], chance: random.Random, bits: Sequence[int]) -> None:
    """Flip one of these bits of a number in one of the tensors."""
    held = [as_bytes(tensor) for tensor in tensors]
    (of,) = chance.choices(held, [len(each) for each in held])
    bit = 32 * chance.randrange(len(of) // 4) + chance.choice(bits)
    of[bit // 8] ^= 1 << bit % 8


def blamed(gradients: Sequence[Sequence[torch.Tensor]]) -> tuple[int, ...]:
    """Who is poisoned, as the votes of one rank say."""
    squares = [[square_of(bucket)() for bucket in of] for of in gradients]
    broken = {r for r, of in enumerate(squares) if any(Entry(r, (), each).poisoned for each in of)}
    norms = {r: sum(of) ** 0.5 for r, of in enumerate(squares) if r not in broken}
    return tuple(sorted({*broken, *outliers(norms, MADS)}))


def test_of_flips_in_a_gradient_those_that_make_it_large_are_found(steps: list[Step]) -> None:
    """All replicas train on the others."""
    alarms = sum(blamed(step.gradients) != () for step in steps)
    print(f"gradient, none: {alarms} alarms in {STEPS} steps of {REPLICAS} replicas")
    assert alarms == 0
    found = {}
    for name, bits in (("exponent", EXPONENT), ("sign or mantissa", OTHER)):
        chance, found[name] = random.Random(name), 0
        for _ in range(10 * FLIPS):
            gradients = [[t.clone() for t in of] for of in chance.choice(steps).gradients]
            flip(gradients[VICTIM], chance, bits)
            who = blamed(gradients)
            assert who in ((), (VICTIM,))
            found[name] += len(who)
        print(f"gradient, {name}: {found[name]} of {10 * FLIPS} found at once, each with its replica")
    assert found["exponent"] > 0
    assert found["sign or mantissa"] == 0


def test_a_flip_in_a_sum_is_found_before_the_commit(steps: list[Step]) -> None:
    chance, found = random.Random("sum"), 0
    for _ in range(FLIPS):
        sums = [each.clone() for each in chance.choice(steps).sums]
        before = [checksum(each) for each in sums]
        flip(sums, chance, ANY)
        found += [checksum(each) for each in sums] != before
    print(f"sum: {found} of {FLIPS} found at once, without a replica to blame")
    assert found == FLIPS


@pytest.mark.parametrize("place", ["parameters", "optimizer state"])
def test_a_flip_in_the_state_is_found_within_16_steps_or_leaves_no_trace(
    config: Config, mesh: DeviceMesh, steps: list[Step], place: str
) -> None:
    live = hold(config, mesh)[0]
    tensors = [local(t) for t in (live.params if place == "parameters" else live.optim).values()]
    chance, after, gone = random.Random(place), list[int](), 0
    for _ in range(FLIPS):
        first = chance.randrange(STEPS - SLICES)
        live.load(steps[first].manifest, steps[first].packed)
        flip(tensors, chance, ANY)
        for count, step in enumerate(steps[first : first + SLICES]):
            wrong = live.slice_digest(step.record.prev)
            digests = tuple((r, wrong if r == VICTIM else step.slice) for r in range(REPLICAS))
            if state_id.differ(digests):
                assert state_id.minority(digests) == (VICTIM,)
                after.append(count)
                break
            live.apply(step.record, [each.clone() for each in step.sums], 1.0)
        else:
            gone += live.weights_digest() == steps[first + SLICES].whole
    found = f"{len(after)} of {FLIPS} found, after {sum(after) / len(after):.1f} steps, at most {max(after)}"
    print(f"{place}: {found}, each with its replica; {gone} were gone after {SLICES} steps")
    assert len(after) + gone == FLIPS
    assert max(after) < SLICES


def test_a_flip_in_a_copy_is_found_before_it_is_used(steps: list[Step]) -> None:
    chance, found = random.Random("copy"), 0
    for _ in range(FLIPS):
        step = chance.choice(steps)
        flip([torch.from_numpy(copy := step.packed.copy())], chance, ANY)
        found += step.manifest.checksums != shard_manifest.checksums(copy.data)
    print(f"copy: {found} of {FLIPS} found when it is read, each with its place")
    assert found == FLIPS

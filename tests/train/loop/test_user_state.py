"""State of the user inside the committed state: what it may hold, and that it goes wherever the state goes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from ft_hsdp.core import state_id
from ft_hsdp.errors import ConfigError, DataCorruption
from ft_hsdp.state.transfer import shard_manifest
from ft_hsdp.train.loop.callbacks import CallbackFailed
from ft_hsdp.train.loop.user_state import MAX_JSON, Registered, UserState
from ft_hsdp.train.state.packing import local
from tests.support.refused import refused
from tests.train.state.test_live_state import hold, record, sums

DECAY = 0.75


class Average:
    """An average of sharded weights, and what has been counted: as a user writes it."""

    def __init__(self, params: dict[str, Any], copies: bool = False) -> None:
        self.params, self.copies = params, copies
        self.mean = {name: p.detach().clone() for name, p in params.items()}
        self.seen: dict[str, Any] = {"steps": 0, "best": None, "note": ["a", {"b": 1.5}]}

    def update(self) -> None:
        with torch.no_grad():
            for name, p in self.params.items():
                self.mean[name].lerp_(p, 1 - DECAY)
        self.seen = {**self.seen, "steps": self.seen["steps"] + 1, "best": 0.5}

    def state_dict(self) -> dict[str, Any]:
        mean = {n: t.clone() for n, t in self.mean.items()} if self.copies else self.mean
        return {**mean, **self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self.mean:
            self.mean[name].copy_(state[name])
        self.seen = {key: state[key] for key in self.seen}


class Rank:
    """A replica of one rank with an average, and what it hears of each commit."""

    def __init__(self, mesh: DeviceMesh, copies: bool = False, seed: int = 0) -> None:
        self.live, self.model = hold(mesh, seed=seed)
        self.average = Average(dict(self.model.params), copies)
        self.user = UserState()
        self.user.register(Registered("ema", self.average.state_dict, self.average.load_state_dict))
        self.user.fix()
        self.live.hold(self.user)

    def step(self) -> None:
        live = self.live
        assert live.state is not None
        live.apply(
            record(live.state, live.ledger.cursors), sums(self.model, live.state.step), 0.5, self.average.update
        )

    def packed(self) -> tuple[Any, Any]:
        into = np.full(self.live.layout.nbytes, 0xFF, dtype=np.uint8)
        assert self.live.state is not None
        return self.live.pack(self.live.state, into), into


@pytest.mark.parametrize("copies", [False, True])
def test_an_average_is_fetched_with_the_state_and_goes_on_alike(mesh: DeviceMesh, copies: bool) -> None:
    one, two = Rank(mesh, copies), Rank(mesh, copies, seed=1)
    for _ in range(3):
        one.step()
    manifest, into = one.packed()
    two.live.load(shard_manifest.decode(shard_manifest.encode(manifest)), into)
    assert two.average.seen == {"steps": 3, "best": 0.5, "note": ["a", {"b": 1.5}]}
    assert {t.kind for t in one.live.layout.tensors} == {"param", "optim", "user"}
    assert one.live.layout.fingerprint == two.live.layout.fingerprint
    for rank in (one, two):
        rank.step()
    for name, mean in one.average.mean.items():
        assert torch.equal(mean.full_tensor(), two.average.mean[name].full_tensor()), name
    assert one.live.digest() == two.live.digest()
    assert one.packed()[0] == two.packed()[0]
    two.average.mean[name].add_(1)
    for rank in (one, two):
        rank.step()
    assert one.live.digest() != two.live.digest()


def test_the_initial_state_has_its_name_from_the_users_state_too(mesh: DeviceMesh) -> None:
    one, two, three = (Rank(mesh) for _ in range(3))
    assert one.live.weights_digest() == two.live.weights_digest() != hold(mesh)[0].weights_digest()
    two.average.seen["steps"] = 7
    two.user.refresh()
    next(iter(three.average.mean.values())).add_(1)
    assert len({rank.live.weights_digest() for rank in (one, two, three)}) == 3


def test_a_change_of_a_tensor_outside_of_on_commit_is_found(mesh: DeviceMesh) -> None:
    """In the step whose slice of the state holds it."""
    rank = Rank(mesh)
    changed = rank.live.layout.tensors[-1]
    assert changed.kind == "user"
    while True:
        rank.step()
        rank.packed()
        state = rank.live.state
        assert state is not None
        start, stop = state_id.slice_bounds(rank.live.layout.nbytes, state.step)
        if start <= changed.offset < stop:
            break
    lineage = state.lineage
    assert rank.live.slice_digest(lineage)
    local(rank.average.mean[changed.name.removeprefix("ema/")]).view(-1)[0] += 1
    with pytest.raises(DataCorruption, match=r"may change in job.on_commit alone: ema/"):
        rank.live.slice_digest(lineage)


def test_a_change_of_a_value_outside_of_on_commit_shows_at_the_next_vote(mesh: DeviceMesh) -> None:
    """The replica that did not make it, because it was behind, has another digest."""
    one, two = Rank(mesh), Rank(mesh)
    one.average.seen["steps"] = 10
    for rank in (one, two):
        rank.step()
    assert one.live.state == two.live.state
    assert one.live.state is not None
    lineage = one.live.state.lineage
    assert one.live.slice_digest(lineage) != two.live.slice_digest(lineage)


def user(state_dict: Callable[[], Any], name: Any = "mine") -> UserState:
    made = UserState()
    made.register(Registered(name, state_dict, lambda _: None))
    return made


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [
        object(),
        np.zeros(2),
        (1, 2),
        float("nan"),
        2**63,
        {1: 2},
        ["\udcff"],
        {"\udcff": 2},
        [[torch.ones(1)]],
        torch.eye(2).to_sparse(),
        torch.empty(2, device="meta"),
        nested(20),
    ],
)
def test_what_cannot_be_state_is_refused_by_name(value: Any) -> None:
    refused(user(lambda: {"k": value}).fix, key="job.register_state(mine)[k]")


def test_values_that_are_too_long_as_json_are_refused() -> None:
    refused(user(lambda: {"k": "x" * (MAX_JSON + 1)}).fix, key="job.register_state")


@pytest.mark.parametrize("found", [[1], None, {3: 1}, {"": 1}, {"k" * 513: 1}, {"\udcff": 1}])
def test_a_state_dict_is_a_mapping_by_text(found: Any) -> None:
    refused(user(lambda: found).fix, r"^job.register_state\(mine\): got")


@pytest.mark.parametrize(
    ("after", "key"),
    [
        ({"t": torch.ones(3), "v": 1}, "t"),
        ({"t": torch.ones(2, dtype=torch.int64), "v": 1}, "t"),
        ({"v": 1}, "t"),
        ({"t": torch.ones(2), "v": 1, "w": 1}, "w"),
        ({"t": torch.ones(2), "v": torch.ones(1)}, "v"),
        ({"t": torch.ones(2), "v": {1}}, "v"),
    ],
)
def test_a_state_that_changes_in_kind_is_refused_by_name(after: dict[str, Any], key: str) -> None:
    found: list[dict[str, Any]] = [{"t": torch.zeros(2), "v": 0}]
    made = user(lambda: found[-1])
    made.fix()
    made.refresh()
    found.append(after)
    with pytest.raises(CallbackFailed) as failed:
        made.refresh()
    assert isinstance(failed.value.__cause__, ConfigError)
    assert failed.value.__cause__.key == f"job.register_state(mine)[{key}]"


def test_a_state_without_a_value_of_ours_is_not_loaded(mesh: DeviceMesh) -> None:
    one, two = Rank(mesh), Rank(mesh)
    one.step()
    manifest, into = one.packed()
    with pytest.raises(CallbackFailed, match=r"job.register_state\(ema\).*in a state to load"):
        two.live.load(replace(manifest, user={"ema": {"steps": 1}}), into)


@pytest.mark.parametrize("name", ["", "a b", "a/b", "x" * 65, 3])
def test_names_are_words(name: Any) -> None:
    refused(lambda: user(dict, name), r"job.register_state: got")


def test_states_are_registered_once_and_before_the_first_batch() -> None:
    made = user(dict)
    refused(lambda: made.register(Registered("mine", dict, print)), "a name that is not registered yet")
    with pytest.raises(ConfigError, match=r"job.register_state\(other\): got .*; allowed: two functions"):
        made.register(Registered("other", dict, None))  # type: ignore[arg-type]
    made.fix()
    refused(lambda: made.register(Registered("late", dict, print)), "a call before the first batch")

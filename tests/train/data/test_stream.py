import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp.errors import ConfigError
from ft_hsdp.train.data import stream as module
from ft_hsdp.train.data.samples import JobShape
from ft_hsdp.train.data.step_plan import MicroBatch
from ft_hsdp.train.data.stream import BatchStream
from tests.support.refused import refused

SHAPE = JobShape(2, 2, 2, 2)


def at(item: int, shard: int = 1) -> MicroBatch:
    """Item n is micro-batch n % 2 of batch n // 2."""
    return MicroBatch(shard, item // 2, item % 2, 2 * item)


class Items:
    """An iterable with a state; it counts what it reads."""

    def __init__(self, items: int = 10**6) -> None:
        self.items = items
        self.next = self.read = self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        while self.next < self.items:
            self.next += 1
            self.read += 1
            yield 1000 * self.epoch + self.next - 1
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next, "generator": torch.arange(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert torch.equal(state["generator"], torch.arange(3))
        self.next = state["next"]


def stream(source: Any, run: Path, rank: int = 1) -> BatchStream[Any]:
    return BatchStream(source, SHAPE, run, rank, lambda stream: iter(()))


@pytest.fixture(autouse=True)
def _always_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAVE_S", 0.0)


def test_a_gap_is_trained_later(tmp_path: Path) -> None:
    reader = stream(Items(), tmp_path).reader(1)
    assert [reader.batch(at(n), []) for n in (3, 1, 4)] == [3, 1, 4]
    reader.trained(at(2))
    assert [reader.batch(at(n), []) for n in (2, 5)] == [2, 5]


@given(
    steps=st.lists(st.tuples(st.integers(1, 3), st.sampled_from(["committed", "dropped", "killed"])), max_size=30),
    kind=st.sampled_from(["stateful", "plain", "function"]),
    length=st.integers(1, 7),
)
def test_each_item_counts_once_and_in_order_whatever_happens(tmp_path_factory, steps, kind, length) -> None:
    """Epochs of a few items, steps of one to three; a replica that is killed opens its stream anew."""
    run = tmp_path_factory.mktemp("run")

    def opened() -> Any:
        if kind == "plain":
            return list(range(length))
        return Items(length) if kind == "stateful" else lambda shard, shards: iter(range(length))

    reader = stream(opened(), run).reader(1)
    trained, counted = 0, []
    for count, ending in steps:
        reader.trained(at(trained))
        got = [reader.batch(at(trained + n), []) for n in range(count)]
        if ending == "killed":
            reader = stream(opened(), run).reader(1)
            reader.guess(map(at, range(trained, trained + 9)))
        elif ending == "committed":
            trained += count
            counted += got
    expected = [n % length + (1000 * (n // length) if kind == "stateful" else 0) for n in range(trained)]
    assert counted == expected


def test_a_new_process_begins_at_the_saved_state_and_passes_over_the_rest(tmp_path: Path) -> None:
    reader = stream(Items(), tmp_path).reader(1)
    for first in range(0, 12, 2):
        reader.trained(at(first))
        for n in range(first, first + 2):
            reader.batch(at(n), [])
    saved = json.loads((tmp_path / "replicas" / "1" / "stream-1.json").read_text())
    assert 0 < saved["items"] <= 10
    items = Items()
    reader = stream(items, tmp_path).reader(1)
    reader.guess(map(at, range(12, 20)))
    assert items.read == 13 - saved["items"], "the first batch is read, too"
    assert reader.batch(at(12), []) == 12


def test_a_disk_that_hangs_holds_up_no_batch_and_has_the_state_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, answers, write = tmp_path / "replicas" / "1" / "stream-1.json", threading.Event(), module.replace_json

    def slow(path: Path, value: object) -> None:
        assert answers.wait(30)
        write(path, value)

    monkeypatch.setattr(module, "replace_json", slow)
    reader = stream(Items(), tmp_path).reader(1)
    for n in range(8):
        reader.trained(at(n))
        assert reader.batch(at(n), []) == n
    assert not file.exists()
    answers.set()
    reader.trained(at(8))
    reader.close()
    assert json.loads(file.read_text())["items"] > 0


def test_a_state_that_is_ahead_or_of_another_job_is_not_used(tmp_path: Path) -> None:
    reader = stream(Items(), tmp_path).reader(1)
    for n in range(8):
        reader.trained(at(n))
        reader.batch(at(n), [])
    file = tmp_path / "replicas" / "1" / "stream-1.json"
    assert json.loads(file.read_text())["items"] > 3
    items = Items()
    assert stream(items, tmp_path).reader(1).batch(at(3), []) == 3, "the job resumed from an older checkpoint"
    assert items.read == 4
    items = Items()
    other = BatchStream(items, JobShape(2, 3, 2, 2), tmp_path, 1, lambda stream: iter(())).reader(1)
    assert (other.batch(at(9), []), items.read) == (9, 10)
    for damaged in (
        "",
        "{}",
        "[]",
        '{"layout": [2, 2, 2], "items": 1, "epoch": 0, "state": {"is": "?", "value": 1}}',
    ):
        file.write_text(damaged)
        items = Items()
        reader = stream(items, tmp_path).reader(1)
        assert reader.batch(at(9), []) == 9
        assert items.read == 10


def test_a_function_is_told_which_part_of_the_data_is_its_own(tmp_path: Path) -> None:
    asked = []

    def part(shard: int, shards: int) -> range:
        asked.append((shard, shards))
        return range(shard, 100, shards)

    for shard in range(2):
        for rank in range(2):
            assert stream(part, tmp_path).reader(rank).batch(at(1, shard), []) == 4 + 2 * shard + rank
    assert asked == [(0, 4), (1, 4), (2, 4), (3, 4)]


@pytest.mark.parametrize("source", [[], lambda shard, shards: (), lambda shard, shards: iter(())])
def test_a_part_without_items_is_refused_by_its_number_before_the_first_batch(tmp_path: Path, source: Any) -> None:
    with pytest.raises(ConfigError, match=r"^job.stream\(source\): got '.* without a batch for shard \d of \d'"):
        stream(source, tmp_path).reader(0).guess([at(0)])


@pytest.mark.parametrize("source", [iter([5, 6]), (n for n in range(9)), map(str, [1])])
def test_what_can_be_iterated_over_only_once_is_refused_at_once(tmp_path: Path, source: Any) -> None:
    refused(lambda: stream(source, tmp_path), "each time it is iterated over, or a function of")


@pytest.mark.parametrize("source", [3, None])
def test_what_is_no_iterable_is_refused(tmp_path: Path, source: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"^job.stream\(source\): got '.*'; allowed: an iterable of batches, or a f"
    ):
        stream(source, tmp_path)
    refused(lambda: stream(lambda shard, shards: source, tmp_path).reader(0).batch(at(0), []), "a function of")
    refused(lambda: stream([1], tmp_path).batch(0, 0, 0), "a stream is read in order")


def test_a_state_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    items = Items()
    items.state_dict = lambda: {"open": Path()}
    reader = stream(items, tmp_path).reader(0)
    with pytest.raises(ConfigError, match=r"^job.stream: state_dict\(\): got 'PosixPath'; allowed: numbers, text"):
        reader.batch(at(0), [])


class LiveItems(Items):
    """Its state is the mapping that it goes on to change."""

    def __init__(self) -> None:
        super().__init__()
        self.state = {"next": 0}
        self.loaded: int | None = None

    def __iter__(self) -> Iterator[int]:
        while True:
            self.state["next"] += 1
            yield self.state["next"] - 1

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state, self.loaded = state, state["next"]


def test_a_state_is_saved_as_it_was_though_it_changes_later(tmp_path: Path) -> None:
    """The micro-batches of a step are read before the step is committed."""
    shape = JobShape(2, 2, 2, 4)

    def reader(items: LiveItems) -> Any:
        return BatchStream(items, shape, tmp_path, 0, lambda stream: iter(())).reader(0)

    def micro(item: int) -> MicroBatch:
        return MicroBatch(1, item // 4, item % 4, 2 * item)

    first = reader(LiveItems())
    assert [first.batch(micro(n), []) for n in range(4)] == [0, 1, 2, 3]
    first.trained(micro(4))
    again = reader(items := LiveItems())
    assert [again.batch(micro(n), []) for n in range(4, 8)] == [4, 5, 6, 7]
    assert items.loaded is not None, "it is not read from its first item on"


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
states = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers()), inner)
    ),
    max_leaves=8,
)


@given(state=states)
def test_a_state_comes_back_from_json_as_it_was(state: Any) -> None:
    assert repr(module.decode_state(json.loads(json.dumps(module.encode_state(state), allow_nan=False)))) == repr(
        state
    )


@pytest.mark.parametrize(
    "array",
    [
        torch.get_rng_state(),
        torch.zeros(0, 2),
        torch.tensor(True),
        torch.arange(6).reshape(2, 3).T,
        np.float32(1.5),
        np.arange(4, dtype=np.uint32),
        np.array(3),
    ],
)
def test_tensors_and_arrays_come_back_as_they_were(array: Any) -> None:
    back = module.decode_state(json.loads(json.dumps(module.encode_state({"a": [array]}))))["a"][0]
    assert type(back) is type(array)
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert (back == array).all()
    if isinstance(back, torch.Tensor | np.ndarray):
        back.fill_(0) if isinstance(back, torch.Tensor) else back.fill(0)  # it can be written to


@pytest.mark.parametrize(
    "value", [{"is": "array", "value": 3}, {"is": "set", "value": []}, {"value": 3}, {"is": "bytes"}]
)
def test_what_was_not_encoded_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="no state"):
        module.decode_state([value])

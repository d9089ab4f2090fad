"""Which facts are known about data of many kinds, and which differences show."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import math
import random
import subprocess
import sys
import time
from collections import OrderedDict, namedtuple
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from ft_hsdp.core.replica_state import RANDOM, UNKNOWN, other_data
from ft_hsdp.train.data.batches import Batches
from ft_hsdp.train.data.facts import array_facts, digest, sample_facts
from ft_hsdp.train.data.loader import Loader
from ft_hsdp.train.data.prefetch import Prefetcher
from ft_hsdp.train.data.samples import JobShape, SampleReader
from ft_hsdp.train.data.sources import facts_of
from ft_hsdp.train.data.stream import BatchStream
from ft_hsdp.train.data.workers import ReadOptions
from ft_hsdp.train.tokens import Tokens

Pair = namedtuple("Pair", "x y")


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Record:
    text: str
    ids: Any


def image(colour: int) -> Any:
    pil = pytest.importorskip("PIL.Image")
    return pil.new("RGB", (2, 2), (colour, 0, 0))


# One value, the same one made otherwise, and another one.
VALUES: list[tuple[Any, Any, Any]] = [
    (torch.arange(6.0), torch.arange(12.0)[:6], torch.arange(6.0) + 1),
    (torch.arange(6).view(2, 3), torch.arange(6).view(3, 2).reshape(2, 3), torch.arange(6).view(3, 2)),
    (torch.zeros(2, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.bfloat16)[::2], torch.zeros(2)),
    (torch.tensor(1), torch.tensor([1])[0], torch.tensor([1])),
    (torch.empty(0), torch.zeros(0), torch.zeros(0, 1)),
    (torch.tensor([1j]).conj(), torch.tensor([0 - 1j]), torch.tensor([1j])),
    (torch.tensor([1.0], requires_grad=True), torch.tensor([1.0]), torch.tensor([2.0])),
    (np.arange(4), np.arange(8)[:4], np.arange(4.0)),
    (np.float32(1), np.float32(1), np.float64(1)),
    (np.array(["a", "b"]), np.array(["a", "b"]), np.array(["a", "c"])),
    (np.array([1, "a"], dtype=object), np.array([1, "a"], dtype=object), np.array([1, "b"], dtype=object)),
    (1, 1, 1.0),
    (True, True, 1),
    (math.nan, float("nan"), math.inf),
    (0.0, 0.0, -0.0),
    ("a", "a", b"a"),
    ("\udcff", "\udcff", "ÿ"),
    (b"ab", bytearray(b"ab"), b"ba"),
    (None, None, "None"),
    (["a", "b"], ("a", "b"), ["ab"]),
    ([["a"], "b"], [["a"], "b"], ["a", ["b"]]),
    ({"a": 1, "b": 2}, OrderedDict([("b", 2), ("a", 1)]), {"a": 2, "b": 1}),
    ({"x", "y", "z"}, frozenset(["z", "y", "x"]), {"x", "y"}),
    (Pair(1, 2), (1, 2), Pair(2, 1)),
    (Record("a", [1]), Record("a", [1]), Record("a", [2])),
    (Colour.RED, Colour.RED, Colour.BLUE),
    (Decimal("1.0"), Decimal("1.0"), Decimal(1)),
    (datetime.datetime(2026, 1, 1), datetime.datetime(2026, 1, 1), datetime.date(2026, 1, 1)),
    (range(3), range(3), range(4)),
]


@pytest.mark.parametrize(
    ("value", "same", "other"), VALUES, ids=[type(v[0]).__name__ + str(n) for n, v in enumerate(VALUES)]
)
def test_equal_values_have_one_digest_and_others_another(value: Any, same: Any, other: Any) -> None:
    assert digest(value) == digest(same)
    assert digest(value) != digest(other)


def test_images_are_compared_by_their_pixels() -> None:
    assert digest(image(1)) == digest(image(1)) != digest(image(2))


def test_a_digest_is_the_same_in_another_process() -> None:
    """Sets and hashes of text have another order there."""
    code = "from ft_hsdp.train.data.facts import digest; print(digest([{'a', 'b', 'c'}, {'x': 1, 'y': 'ü'}]))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == digest([{"c", "b", "a"}, {"y": "ü", "x": 1}])


@pytest.mark.parametrize(
    "value",
    [object(), Path("a"), lambda: 0, [1, object()], torch.zeros(1, device="meta"), torch.eye(2).to_sparse()],
)
def test_what_cannot_be_hashed_is_unknown_and_not_compared(value: Any) -> None:
    assert sample_facts(1, lambda _: value, math.inf) == {"sample 0": UNKNOWN}


def test_a_value_that_holds_itself_is_unknown() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert sample_facts(1, lambda _: endless, math.inf) == {"sample 0": UNKNOWN}


@pytest.mark.parametrize("draw", [torch.rand, np.random.rand, lambda n: random.random()])
def test_what_the_seeded_generators_draw_is_compared_and_other_noise_is_not(draw: Any) -> None:
    before = torch.get_rng_state(), random.getstate()
    seeded = sample_facts(1, lambda _: draw(1), math.inf)
    assert seeded == sample_facts(1, lambda _: draw(1), math.inf) != {"sample 0": RANDOM}
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    own = np.random.default_rng()
    assert sample_facts(9, lambda _: own.random(), math.inf) == {"sample 0": RANDOM}


@pytest.mark.parametrize("noisy", [3, 7])
def test_samples_that_noise_left_alike_by_chance_are_not_compared(noisy: int) -> None:
    """As of a transform with a generator of its own that changes one sample in two, or in a hundred."""
    own = np.random.default_rng()
    facts = sample_facts(9, lambda at: own.random() if at == noisy else at, math.inf, 60.0)
    assert set(facts.values()) == {RANDOM}
    assert loader(Noise()).keys() & {"samples together"} == set()


def test_a_sample_that_raises_is_unknown() -> None:
    assert sample_facts(9, lambda at: 1 // at, math.inf) == {"sample 0": UNKNOWN}


def loader(dataset: Any, batch_size: int = 4, **arguments: Any) -> dict[str, str]:
    chosen = {"collate_fn": None, "shuffle": True, "drop_last": True, "seed": 7, **arguments}
    reader = SampleReader(dataset, batch_size, **chosen)
    made = Loader(reader, JobShape(1, 1, 2, 2), ReadOptions(), lambda loader: iter(()))
    return made.facts(time.monotonic() + 60)


def rows(count: int, changed: int | None = None) -> TensorDataset:
    x = torch.arange(2.0 * count).view(count, 2)
    if changed is not None:
        x[changed] += 1
    return TensorDataset(x)


class Noise(list[int]):
    """Samples of which some are other ones each time."""

    def __init__(self) -> None:
        super().__init__(range(160))

    def __getitem__(self, at: Any) -> Any:
        return np.random.default_rng().random() if at == 159 else at


class Fetched:
    def __init__(self, add: int = 0) -> None:
        self.add = add

    def __len__(self) -> int:
        return 160

    def __getitem__(self, at: int) -> Any:
        raise AssertionError

    def __getitems__(self, places: list[int]) -> list[int]:
        return [at + self.add for at in places]


REVERSED = list(range(160))[::-1]


@pytest.mark.parametrize(
    ("mine", "other", "fact"),
    [
        (loader(rows(160)), loader(rows(159)), "length"),
        (loader(rows(160)), loader(rows(160, 0)), "sample 0"),
        (loader(rows(160)), loader(rows(160, 159)), "sample 159"),
        (loader(rows(160)), loader(rows(160), 2), "batch_size"),
        (loader(rows(160)), loader(rows(160), drop_last=False), "drop_last"),
        (loader(rows(160)), loader(rows(160), shuffle=False), "shuffle"),
        (loader(rows(160)), loader(rows(160), seed=8), "seed"),
        (loader(rows(160)), loader(rows(160), collate_fn=len), "samples together"),
        (loader(rows(160)), loader(Subset(rows(160), REVERSED)), "sample 0"),
        (loader(list(range(160))), loader([*range(159), -1]), "sample 159"),
        (loader(Fetched()), loader(Fetched(1)), "sample 0"),
        (loader(ConcatDataset([rows(60), rows(100)])), loader(ConcatDataset([rows(100), rows(60)])), "sample 159"),
    ],
)
def test_a_difference_of_two_loaders_has_a_name(mine: dict[str, str], other: dict[str, str], fact: str) -> None:
    found = other_data(mine, other)
    assert found is not None
    assert found[0] == fact or (fact.startswith("sample") and found[0].startswith("sample"))
    assert found[1:] == (mine[found[0]], other[found[0]])
    assert other_data(mine, dict(mine)) is None


def test_a_small_set_is_compared_as_a_whole() -> None:
    whole = sample_facts(200, list(range(200)).__getitem__, math.inf, 60.0)
    for changed in range(0, 200, 7):
        others = [-1 if at == changed else at for at in range(200)]
        assert other_data(whole, sample_facts(200, others.__getitem__, math.inf, 60.0)) is not None


def test_what_there_was_no_time_for_is_not_compared() -> None:
    reads: list[int] = []

    def read(at: int) -> int:
        reads.append(at)
        return at

    slow = sample_facts(160, read, time.monotonic() - 1)
    assert (slow, reads) == ({}, [])
    assert other_data(slow, sample_facts(160, read, math.inf)) is None
    assert other_data({"sample 0": RANDOM}, {"sample 0": "1"}) is None
    assert other_data({"sample 0": "1"}, {"sample 0": UNKNOWN}) is None


def tokens(count: int, changed: int | None = None) -> dict[str, str]:
    array = np.arange(count, dtype=np.uint16)
    if changed is not None:
        array[changed] ^= 1
    return Batches(Tokens(array), 8, 2, 0, 1).facts(math.inf)


@pytest.mark.parametrize(("count", "changed"), [(1000, 500), (3_000_000, 1), (3_000_000, 2_900_001)])
def test_one_token_shows(count: int, changed: int) -> None:
    assert other_data(tokens(count), tokens(count)) is None
    found = other_data(tokens(count), tokens(count, changed))
    assert found is not None
    assert found[0].startswith("text")


def test_the_length_of_a_text_is_named_first() -> None:
    assert other_data(tokens(1001), tokens(1000)) == ("length", "1001", "1000")


def test_a_large_text_is_read_in_part(tmp_path: Path) -> None:
    """64 GiB, of which nothing is on the disk."""
    path = tmp_path / "tokens.bin"
    with path.open("wb") as file:
        file.truncate(64 << 30)
    found = array_facts(np.memmap(path, dtype="<u2", mode="r"), time.monotonic() - 1)
    assert found == {"length": str(32 << 30)}
    first = array_facts(np.memmap(path, dtype="<u2", mode="r"), _Ticks(100))
    assert set(first) == {"length", "text"}
    with path.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    assert array_facts(np.memmap(path, dtype="<u2", mode="r"), _Ticks(100)) != first


def test_of_a_users_own_source_rank_0_alone_tells_the_length_and_a_batch() -> None:
    source = Part()
    reader = Prefetcher[int](source)
    of_two, of_four, of_another = (facts_of(source, reader, True, *place) for place in ((0, 2), (0, 4), (1, 4)))
    reader.close()
    own = {"length with 4 data ranks": "80", "batch 0 with 4 data ranks": digest(7)}
    assert of_four == {"kind": "Part", **own}
    assert of_another == {"kind": "Part"}
    assert not of_two.keys() & own.keys(), "a replica that has lost ranks cuts its part otherwise"


class Part:
    """The part of one rank: the other has one more."""

    def __len__(self) -> int:
        return 80

    def batch(self, shard: int, index: int, rank: int, micro: int = 0) -> int:
        return 7


class _Ticks(float):
    """A time that comes after so many looks at the clock."""

    left: int

    def __new__(cls, looks: int) -> _Ticks:
        self = super().__new__(cls, 0)
        self.left = looks
        return self

    def __le__(self, now: object) -> bool:
        self.left -= 1
        return self.left < 0


def test_a_stream_is_read_only_if_it_can_be_opened_again(tmp_path: Path) -> None:
    opened: list[tuple[int, int]] = []

    def part(shard: int, shards: int) -> list[int]:
        opened.append((shard, shards))
        return [1, 2, 3]

    def stream(source: Any) -> dict[str, str]:
        made = BatchStream(source, JobShape(2, 2, 2, 1), tmp_path, 0, lambda stream: iter(()))
        return made.facts(math.inf)

    assert stream([1]) == {}
    assert stream(part) == {"sample 0": digest([1, 2])}
    assert opened == [(0, 4), (0, 4)]

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp.train.data.batches import IGNORED, Batches
from ft_hsdp.train.tokens import SEPARATOR, Tokens
from tests.support.refused import refused


def counting(n: int) -> Tokens:
    """Tokens whose value is their place."""
    return Tokens(np.arange(n, dtype=np.uint16))


layouts = st.fixed_dictionaries(
    {
        "rows": st.integers(1, 3),
        "shards": st.integers(1, 4),
        "ranks": st.integers(1, 3),
        "accumulate": st.integers(1, 2),
    }
)


@given(layout=layouts, extra=st.integers(0, 50), seed=st.integers(0, 2**32))
def test_shards_in_step_use_every_window_once_a_pass(layout: dict[str, Any], extra: int, seed: int) -> None:
    step = layout["rows"] * layout["shards"] * layout["ranks"] * layout["accumulate"]
    batches = Batches(counting((step + extra) * 8 + 1), 8, seed=seed, **layout)
    assert batches.windows == step + extra
    used = Counter(
        place
        for index in range(-(-2 * batches.windows // step))
        for shard in range(layout["shards"])
        for rank in range(layout["ranks"])
        for micro in range(layout["accumulate"])
        for place in batches.windows_of(shard, index, rank, micro)
    )
    assert max(used.values()) == 1
    for turn in (0, 1):
        assert {window for t, window in used if t == turn} == set(range(batches.windows))


def test_targets_are_the_inputs_one_token_later() -> None:
    batches = Batches(counting(1000), 9, rows=3, seed=5, shards=2, ranks=2)
    inputs, targets = batches.batch(1, 4, 1)
    assert inputs.shape == targets.shape == (3, 9)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous()
    assert targets.is_contiguous()
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(inputs % 9, torch.arange(9).expand(3, 9))  # a window starts at a multiple of its length
    assert (inputs[:, 0] // 9).tolist() == [window for _, window in batches.windows_of(1, 4, 1)]


def test_the_first_token_of_a_document_may_be_no_target() -> None:
    tokens = counting(200)
    tokens.array[::7] = SEPARATOR
    inputs, targets = Batches(tokens, 9, rows=3, seed=5, shards=1, ignore_first=True).batch(0, 2, 0)
    _, all_targets = Batches(tokens, 9, rows=3, seed=5, shards=1).batch(0, 2, 0)
    first = inputs == SEPARATOR
    assert first.any()
    assert (targets[first] == IGNORED).all()
    assert torch.equal(targets[~first], all_targets[~first])
    assert SEPARATOR in targets, "the end of a document can be foreseen"


def test_the_last_window_has_its_target() -> None:
    batches = Batches(counting(17), 8, rows=2, seed=0, shards=1)
    inputs, targets = batches.batch(0, 0, 0)
    assert sorted(inputs.flatten().tolist()) == list(range(16))
    assert targets.max() == 16
    few = r"got '64 tokens'; allowed: at least 65 tokens"
    refused(lambda: Batches(counting(64), 8, rows=2, seed=0, shards=2, ranks=2), few, "data.path")


def test_a_batch_depends_on_its_arguments_alone() -> None:
    layout: dict[str, Any] = {"rows": 2, "seed": 3, "shards": 2, "ranks": 2, "accumulate": 2}
    one, other = Batches(counting(5000), 8, **layout), Batches(counting(5000), 8, **layout)
    places = [(s, i, r, m) for i in range(9) for s in range(2) for r in range(2) for m in range(2)]
    forward = {p: one.batch(*p)[0] for p in places}
    backward = {p: other.batch(*p)[0] for p in reversed(places)}
    assert all(torch.equal(forward[p], backward[p]) for p in places)
    reseeded = Batches(counting(5000), 8, **{**layout, "seed": 4})
    assert not all(torch.equal(forward[p], reseeded.batch(*p)[0]) for p in places)


@given(old=st.integers(1, 5), new=st.integers(1, 5), number=st.integers(0, 200))
def test_a_batch_keeps_its_text_under_another_number_of_shards(old: int, new: int, number: int) -> None:
    one, other = (Batches(counting(801), 8, rows=2, seed=7, shards=n, ranks=2) for n in (old, new))
    for rank in range(2):
        was = one.windows_of(number % old, number // old, rank)
        assert other.windows_of(number % new, number // new, rank) == was


def test_passes_differ_in_order() -> None:
    batches = Batches(counting(801), 8, rows=1, seed=0, shards=1)
    orders = [[batches.windows_of(0, turn * 100 + i, 0)[0][1] for i in range(100)] for turn in range(2)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(100))
    assert orders[0] != orders[1]


def test_what_lies_outside_the_layout_is_refused() -> None:
    batches = Batches(counting(1000), 8, rows=1, seed=0, shards=2, ranks=3, accumulate=2)
    for place in ((2, 0, 0, 0), (-1, 0, 0, 0), (0, 0, 3, 0), (0, 0, 0, 2), (0, -1, 0, 0)):
        with pytest.raises(ValueError, match="it must be"):
            batches.batch(*place)
    with pytest.raises(ValueError, match="rows is 0"):
        Batches(counting(1000), 8, rows=0, seed=0, shards=2)

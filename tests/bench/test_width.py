from __future__ import annotations

import io
from argparse import Namespace
from typing import Any

import numpy as np
import pytest

from ft_hsdp.bench import goals
from ft_hsdp.bench.command import WIDTH, width_options
from ft_hsdp.bench.results import MIB, ProgressLog, spread
from ft_hsdp.bench.width import allreduce, blocks, reshape
from ft_hsdp.errors import ConfigError
from tests.support.bench.tables import shown

EMPTY: dict[str, Any] = {name: [] for name in (*WIDTH, "loads")}


def test_all_measures_unless_one_is_named() -> None:
    options = width_options(Namespace(measure=None, rounds=None, sizes=None))
    assert (options.measures, options.sizes, options.gradients) == (WIDTH, (256 * MIB,), (64 * MIB,))
    with pytest.raises(ConfigError, match="reshape"):
        width_options(Namespace(measure="narrower", rounds=None, sizes=None))


def test_another_number_of_ranks_beside_the_goals() -> None:
    took = {"ft_hsdp": spread([0.1, 0.2, 0.1]), "dcp": spread([0.3, 0.3, 0.4])}
    row: dict[str, Any] = {"bytes": 256 * MIB, "from": 4, "to": 3, "rounds": 3, "contenders": took}
    row |= {"times_as_fast": 3.0, "read_bytes": 1010, "least_bytes": 1000, "times_least": 1.01}
    assert [v.met for v in goals.width({**EMPTY, "reshape": [row]})] == [True, True]
    assert "1010 bytes read, 1.0100 times the least possible (1000)" in shown("width", {**EMPTY, "reshape": [row]})
    worse = {**row, "times_as_fast": 1.9, "times_least": 1.06}
    assert [v.met for v in goals.width({**EMPTY, "reshape": [worse]})] == [False, False]


def test_a_state_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="what fits 5 times into"):
        reshape.reshape(1 << 60, 1, ProgressLog(io.StringIO()))


def test_the_state_is_as_large_as_asked_for_and_the_same_in_both_widths() -> None:
    found: dict[int, list[bytes]] = {}
    for width in reshape.WIDTHS:
        places = [reshape.layout(4 * MIB, width, rank) for rank in range(width)]
        assert sum(t.nbytes for place in places for t in place.tensors) == pytest.approx(4 * MIB, rel=0.05)
        cut = [reshape.tensors_of(place, width, rank) for rank, place in enumerate(places)]
        whole = [np.concatenate([each[number] for each in cut]) for number in range(reshape.TENSORS)]
        found[width] = [each.tobytes() for each in whole]
    assert found[4] == found[3]


def test_loads_of_blocks_beside_the_goal() -> None:
    row = blocks.planned(8, blocks.PER_HOST)
    assert [v.met for v in goals.width({**EMPTY, "blocks": [row]})] == [True]
    worse = {**row, "scattered": {**row["scattered"], "times": 1.16}}
    assert [v.met for v in goals.width({**EMPTY, "blocks": [worse]})] == [False]
    loads = blocks.loaded(4, MIB, 1)
    assert set(loads["loads"]) == {"scattered", "consecutive"}
    text = shown("width", {**EMPTY, "blocks": [row], "loads": [loads]})
    assert "from 4 servers on this machine" in text


def test_unequal_replicas_beside_the_goal() -> None:
    took = {"4+4": spread([0.1, 0.1, 0.1]), "4+3": spread([0.12, 0.12, 0.12])}
    row: dict[str, Any] = {"bytes": 64 * MIB, "rounds": 3, "contenders": took, "lanes": 6, "times": 1.2}
    assert [v.met for v in goals.width({**EMPTY, "allreduce": [row]})] == [True]
    assert [v.met for v in goals.width({**EMPTY, "allreduce": [{**row, "times": 1.26}]})] == [False]
    assert "1.20 times as long in 6 lanes" in shown("width", {**EMPTY, "allreduce": [row]})


@pytest.mark.multiproc
def test_processes_of_replicas_of_4_and_3_ranks_get_the_same_bits() -> None:
    """`DataCorruption` if the owners of a lane hold other sums."""
    row = allreduce.allreduce(2 * MIB, 1, ProgressLog(io.StringIO()))
    assert row["lanes"] == 6
    assert set(row["contenders"]) == {"4+4", "4+3"}


@pytest.mark.multiproc
def test_both_ways_carry_a_small_state() -> None:
    row = reshape.reshape(2 * MIB, 1, ProgressLog(io.StringIO()))
    assert set(row["contenders"]) == {"ft_hsdp", "dcp"}
    assert 1.0 <= row["times_least"] < 1.05 + 200_000 / row["least_bytes"], "the manifests of parts are small"

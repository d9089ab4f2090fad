"""A rank's communication is watched while copies of its replica's shards are made, and only then."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ft_hsdp.jsonl import Journal
from ft_hsdp.memory.schedule import Profile
from ft_hsdp.state.pacing import MAX_SPANS, PAGE_BYTES, SpanMeter
from ft_hsdp.state.shared_memory import Bytes
from ft_hsdp.train.fsdp import param_groups
from ft_hsdp.train.state.idle_spans import SpanWatch
from tests.support.train.meter import Meter


class Agent:
    """Opens a gate at once."""

    def __init__(self) -> None:
        self.orders: list[str] = []

    def open_gate(self, attach: Callable[[Bytes], None]) -> None:
        self.orders.append("open")
        attach(np.zeros(PAGE_BYTES, dtype=np.uint8))

    def close_gate(self) -> None:
        self.orders.append("close")


def test_a_rank_is_watched_while_that_is_wanted(tmp_path: Path) -> None:
    agent, watched = Agent(), list[SpanMeter | None]()
    spans = SpanWatch(watched.append, agent, Journal(tmp_path / "events.jsonl"))
    spans.want(False)
    spans.step(1)
    assert (agent.orders, watched) == ([], [])
    spans.want(True)
    spans.want(True)
    assert (agent.orders, watched) == (["open"], [spans.meter])
    spans.want(False)
    assert (agent.orders, watched) == (["open", "close"], [spans.meter, None])


def test_it_is_told_how_copies_leave_when_that_changes(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    spans = SpanWatch(lambda _: None, Agent(), Journal(file))
    steady, unsteady = Profile((0.1, 0.2), 0.05), Profile((0.1, 0.2), 0.5)
    for profile, planned in ((steady, True), (steady, True), (unsteady, False), (steady, True)):
        spans._found(profile, planned)
        assert spans.planned is planned
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["event"], row["planned"], row["spans"]) for row in rows] == [
        ("CopiesPaced", True, 2),
        ("CopiesPaced", False, 2),
        ("CopiesPaced", True, 2),
    ]
    assert "not steady (50 % deviation)" in rows[1]["reason"]


def test_more_spans_than_a_plan_has_are_said_to_be_too_many(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    many = Profile((0.001,) * (MAX_SPANS + 1), 0.0)
    SpanWatch(lambda _: None, Agent(), Journal(file))._found(many, False)
    (row,) = map(json.loads, file.read_text().splitlines())
    assert row["reason"] == f"a step has {MAX_SPANS + 1} idle spans, more than the {MAX_SPANS} of the largest plan"


class Work:
    """A communication that ends later."""

    def __init__(self) -> None:
        self.future: Future[None] = Future()

    def get_future(self) -> Future[None]:
        return self.future


class Communication:
    """One of FSDP2, which returns at once or ends later."""

    def __init__(self, meter: Meter, work: Work | None) -> None:
        self.meter, self.work = meter, work

    def allocate(self, size: int) -> torch.Tensor:
        return torch.empty(size)

    def __call__(self, group: str) -> Work | None:
        self.meter.told.append(group)
        return self.work


class Raw:
    """A parameter group of torch."""

    def __init__(self, *communications: Any) -> None:
        self._all_gather_comm, self._reduce_scatter_comm = communications


def test_what_fsdp_sends_is_seen_until_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    meter, work, model = Meter(), Work(), torch.nn.Identity()
    raw = Raw(Communication(meter, None), Communication(meter, work))
    own = raw._all_gather_comm, raw._reduce_scatter_comm
    monkeypatch.setattr(param_groups, "_raw_groups", lambda _: iter([raw]))
    for _ in range(2):
        param_groups.watch(model, meter)  # type: ignore[arg-type]
    assert raw._all_gather_comm.allocate(3).numel() == 3
    raw._all_gather_comm("gather")
    assert meter.told == ["begin", "gather", "end"]
    assert raw._reduce_scatter_comm("scatter") is work
    assert meter.told[3:] == ["begin", "scatter"]
    work.future.set_result(None)
    assert meter.told[3:] == ["begin", "scatter", "end"]
    param_groups.unwatch(model)
    assert (raw._all_gather_comm, raw._reduce_scatter_comm) == own
    param_groups.unwatch(model)
    raw._all_gather_comm("alone")
    assert meter.told[6:] == ["alone"]

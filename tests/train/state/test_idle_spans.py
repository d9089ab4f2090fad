"""A rank's communication is watched while copies of its replica's shards are made, and only then."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ft_hsdp.jsonl import Journal
from ft_hsdp.memory.schedule import Profile
from ft_hsdp.state.pacing import MAX_SPANS, PAGE_BYTES, SpanMeter
from ft_hsdp.state.shared_memory import Bytes
from ft_hsdp.train.state.copies import SpanWatch


class Agent:
    """Opens a gate at once."""

    def __init__(self) -> None:
        self.orders: list[str] = []

    def open_gate(self, attach: Callable[[Bytes], None]) -> None:
        self.orders.append("open")
        attach(np.zeros(PAGE_BYTES, dtype=np.uint8))

    def close_gate(self) -> None:
        self.orders.append("close")


AGENT: Any = Agent()


def test_a_rank_is_watched_while_that_is_wanted(tmp_path: Path) -> None:
    agent: Any = Agent()
    watched: list[SpanMeter | None] = []
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
    spans = SpanWatch(lambda _: None, AGENT, Journal(file))
    steady, unsteady = Profile((0.1, 0.2), 0.05), Profile((0.1, 0.2), 0.5)
    many = Profile((0.001,) * (MAX_SPANS + 1), 0.0)
    for profile, planned in ((steady, True), (steady, True), (unsteady, False), (steady, True), (many, False)):
        spans._found(profile, planned)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["event"], row["planned"], row["spans"]) for row in rows] == [
        ("CopiesPaced", True, 2),
        ("CopiesPaced", False, 2),
        ("CopiesPaced", True, 2),
        ("CopiesPaced", False, MAX_SPANS + 1),
    ]
    assert "50 %" in rows[1]["reason"]

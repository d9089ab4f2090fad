"""The tables of a bench, from its figures alone."""

import io
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from benchmarks.results import Verdicts, show

HEAD: Mapping[str, Any] = {
    "date": "2026-11-21T10:00:00+00:00",
    "machine": {"cpu": "A processor", "cores": 2, "load_1min_before": 0.1, "tcp_congestion_default": "bbr"},
    "versions": {"torch": "2.13.0", "torchft": None},
    "contenders": {},
    "notes": [],
}


def shown(figures: Mapping[str, Any], goals: Verdicts) -> str:
    """Return what is printed of a result with these goals, without its first line; it fits 80 columns."""
    stream = io.StringIO()
    show({**HEAD, **figures, "goals": [asdict(each) for each in goals]}, stream)
    head, _, text = stream.getvalue().partition("\n")
    assert "bbr by default" in head
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80, text
    return text

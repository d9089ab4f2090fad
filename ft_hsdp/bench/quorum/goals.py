"""The goals of `bench quorum`, and how what was seen stands to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ft_hsdp.bench.goals import Verdict, most
from ft_hsdp.bench.spread import ratio

TIMES = 1.25
AT = (12, 64)
KINDS = {"same": "a round", "new": "a round that makes an epoch durable"}


def verdicts(rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """Every goal for which there is a figure."""
    return [
        most(f"{text}, times torchft's", {"members": row["members"]}, TIMES, times(row, kind))
        for row in rows
        for kind, text in KINDS.items()
        if row["members"] in AT
    ]


def times(row: Mapping[str, Any], kind: str) -> float:
    """How many times as long as torchft's a round takes, by medians."""
    return ratio(row["rounds"][kind]["p50_ms"], row["rounds"]["torchft"]["p50_ms"])

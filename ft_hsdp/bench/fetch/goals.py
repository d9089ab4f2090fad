"""The goals of `bench fetch`, and how what was seen stands to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ft_hsdp.bench.goals import Verdict, least, most
from ft_hsdp.bench.spread import ratio

RAW_SHARE = 0.8
LARGE_TIMES = 1.3
SMALL_TIMES = 3.0
MEMORY = 1.1
PEERS = ("torchft", "torchft-4")


def verdicts(result: Mapping[str, Any]) -> list[Verdict]:
    """Every goal for which there is a figure."""
    found: list[Verdict] = []
    for row in result["large"]:
        found.append(least("fetch, share of bare sockets' speed", row, RAW_SHARE, times(row, "fetch", "raw")))
        found += _peers(row, "fetch", LARGE_TIMES)
        seen = row["memory"]["fetch"]["times_state"]
        found.append(most("fetch: memory of the receiver, times the state", row, MEMORY, seen))
    for row in result["small"]:
        found += _peers(row, "transport", SMALL_TIMES)
    return found


def times(row: Mapping[str, Any], name: str, other: str) -> float:
    """How many times as fast `name` is as `other`: a ratio of medians."""
    return ratio(row["contenders"][other]["p50_ms"], row["contenders"][name]["p50_ms"])


def _peers(row: Mapping[str, Any], name: str, limit: float) -> Iterator[Verdict]:
    """Beside the best setting of torchft."""
    peers = [peer for peer in PEERS if peer in row["contenders"]]
    if peers and name in row["contenders"]:
        best = min(peers, key=lambda peer: row["contenders"][peer]["p50_ms"])
        text = f"{name} vs torchft, times as fast"
        yield least(text, row, limit, times(row, name, best))

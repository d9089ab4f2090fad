"""The goals of `bench recovery`, and how what was seen stands to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ft_hsdp.bench.goals import Verdict, least, most

NEXT = {"less_one": "SIGKILL to next commit - 1 step", "stall": "all of the step hit - 1 step"}
NEXT_P50_MS, NEXT_P99_MS = 100.0, 300.0
STOP_P50_MS, STOP_P99_MS = 1200.0, 2000.0
REPEAT_SHARE = 0.3
REJOIN_STEPS = 0.1
WARM_MS = 500.0
COLD_TIMES = 1.0
READERS_TIMES = 1.0
LOCAL_TIMES = 5.0


def verdicts(measured: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Verdict]:
    """Every goal for which there is a figure; `measured` has the rows of each measure."""
    found: list[Verdict] = []
    for row in measured.get("kill", ()):
        at = {"members": row["replicas"]}
        for key, text in NEXT.items():
            found.append(most(f"{text}, p50 ms", at, NEXT_P50_MS, row[key]["p50_ms"]))
            found.append(most(f"{text}, p99 ms", at, NEXT_P99_MS, row[key]["p99_ms"]))
        if row["repeat"] is not None:
            found.append(most("reducing again, of a whole step", at, REPEAT_SHARE, row["repeat"]["steps"]))
        found += _rejoin(row)
    for row in measured.get("rejoin", ()):
        found += _rejoin(row)
    for row in measured.get("stop", ()):
        at, text = {"members": row["replicas"]}, "SIGSTOP to next commit - 1 step"
        found.append(most(f"{text}, p50 ms", at, STOP_P50_MS, row["less_one"]["p50_ms"]))
        found.append(most(f"{text}, p99 ms", at, STOP_P99_MS, row["less_one"]["p99_ms"]))
    for row in measured.get("return", ()):
        found += _return(row)
    for row in measured.get("readers", ()):
        text = "a step beside bad readers, times, at least"
        found.append(most(text, {"members": row["replicas"]}, READERS_TIMES, row["times"]["low"]))
    for row in measured.get("local", ()):
        text = "from the agent vs save + load, times as fast"
        found.append(least(text, {"bytes": row["bytes"]}, LOCAL_TIMES, row["times_as_fast"]))
    return found


def _rejoin(row: Mapping[str, Any]) -> list[Verdict]:
    if row["rejoin_wait"] is None:
        return []
    text = f"others' waits for a rejoin, steps of {row['step_ms']:.0f} ms"
    return [most(text, {"members": row["replicas"]}, REJOIN_STEPS, row["rejoin_wait"]["steps"])]


def _return(row: Mapping[str, Any]) -> Iterator[Verdict]:
    at, text = {"members": row["replicas"]}, "SIGKILL to own commit - 1 step"
    warm_ms = row["contenders"]["warm"]["less_one"]["p50_ms"]
    yield most(f"{text}, warm, p50 ms", at, WARM_MS, warm_ms)
    if "cold" in row["times"]:
        yield most(f"{text}, cold / torchft's", at, COLD_TIMES, row["times"]["cold"]["ratio"])

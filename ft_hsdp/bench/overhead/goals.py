"""The goals of `bench overhead`, and how what was seen stands to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ft_hsdp.bench.goals import Verdict, most
from ft_hsdp.bench.goals import verdicts as of_ftar

STEADY = 1.02
RAY = 1.02
SNAPSHOT = {"computing": 1.10, "waiting": 1.02}


def verdicts(measured: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Verdict]:
    """Every goal for which there is a figure; `measured` has the rows of each measure."""
    found: list[Verdict] = []
    for row in measured.get("steady", ()):
        for name, times in row["times"].items():
            if name.startswith("ft_hsdp"):
                found.append(most(f"{name}: a step, times HSDP's", _at(row), STEADY, times["ratio"]))
    for row in measured.get("snapshot", ()):
        text = f"snapshot each step, {row['step']}: times as long"
        found.append(most(text, _at(row), SNAPSHOT[row["step"]], row["times"]["with"]["ratio"]))
    for row in measured.get("ray", ()):
        found.append(most("under Ray: a step, times that under up", _at(row), RAY, row["times"]["ray"]["ratio"]))
    return found + of_ftar({"link": measured.get("link", ())})


def _at(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"members": row["replicas"]}

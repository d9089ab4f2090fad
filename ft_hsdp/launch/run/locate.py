"""`locate`: from an element of a parameter to the rank, the host and the process of each replica that held it.

A machine that computes wrongly may spoil a few elements that lie together: an operator who has found such elements
asks for their host (FT-HSDP §2.2).
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from ft_hsdp.analysis.locate import LocatedSpan, RunPlaces, element_of
from ft_hsdp.errors import ConfigError
from ft_hsdp.launch.run.directory import RunDir, read_jsonl
from ft_hsdp.launch.run.recorder import commits_of, events_of


@dataclass(frozen=True, slots=True)
class Located:
    """Who held a parameter, or an element of it."""

    parameter: str
    shape: tuple[int, ...]
    element: tuple[int, ...] | None  # its indices; None: all of the parameter
    spans: Sequence[LocatedSpan]

    def lines(self) -> list[str]:
        """Return a heading, and a line for each span of steps."""
        what = "" if self.element is None else f", element {list(self.element)}"
        return [
            f"{self.parameter} {list(self.shape)}{what}",
            *(span.line(self.element is None) for span in self.spans),
        ]


def locate(run: RunDir, name: str, index: str | None = None, step: int | None = None) -> Located:
    """Return which ranks of each replica held a parameter, or an element of it, by steps that lasted. Blocks.

    Args:
        run: A run, finished or not.
        name: The parameter's, as in the model's state_dict.
        index: The element's place in row-major order, or its indices with commas; None: all of the parameter.
        step: The only step; None: all.

    Raises:
        ConfigError: There is no such parameter, element or step, or the run has not logged its parameters.
    """
    places = RunPlaces(events_of(run))
    known = places.parameters
    if not known:
        raise ConfigError("RUN", run.name, "one whose ranks have logged their parameters (event ReplicaWarmed)")
    if name not in known:
        near = difflib.get_close_matches(name, known, cutoff=0.3) or sorted(known)[:3]
        raise ConfigError("--parameter", name, f"one of the {len(known)} that are trained, e.g. {', '.join(near)}")
    shape = known[name].shape
    element = None if index is None else element_of(known[name], index)
    if index is not None and element is None:
        raise ConfigError("--index", index, f"0 or more, below the number of elements of {list(shape)}, or I,J,..")
    commits = [row for row in commits_of(run) if step in (None, row["step"])]
    if not commits:
        raise ConfigError("--step", step, "a step that the run has committed")
    lives = {n: {row["lineage"]: row["incarnation"] for row in read_jsonl(run.commits(n))} for n in run.replicas()}
    return Located(name, shape, element, places.spans(name, element, commits, lives))

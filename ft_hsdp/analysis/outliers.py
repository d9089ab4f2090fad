"""Which host computes wrongly now and then: digests of the same training by several ranks and hosts (§2.2). Pure.

A trial is a list of digests by step, from 0, which is before the first step. Two trials of a rank must be equal,
or its host is at fault. Trials of several ranks or hosts are compared where their `numerics` are equal: elsewhere
sums may have other bits. More than half of them are right, and the others are outliers. Without such a majority it
is not known which are right.

Example: of three hosts with equal numerics, c has other digests from step 7 on. So a and b are the majority, and
c is an outlier since step 7.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ft_hsdp.core.state_id import digest

Document = Mapping[str, Any]
"""What `sdc-check` has found on one host, as JSON."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Trials with the same `numerics`."""

    numerics: str
    sets: list[list[str]]  # names of those that are equal, the largest set first
    majority: bool  # whether the first set has more than half of them
    outliers: dict[str, int]  # by name, the first step that differs from the majority's

    @property
    def lines(self) -> list[str]:
        """What was found, in words."""
        first, *others = [", ".join(each) for each in self.sets]
        if not others:
            found = "equal" if len(self.sets[0]) > 1 else "compared with none: no other has its numerics"
            return [f"{first}: {found} ({self.numerics})"]
        if not self.majority:
            return [f"no majority: {' | '.join([first, *others])} differ ({self.numerics})"]
        return [f"{name}: OUTLIER: differs from {first} since step {step}" for name, step in self.outliers.items()]


def first_difference(one: Sequence[object], other: Sequence[object]) -> int | None:
    """Return the first step at which two trials differ; None: they are equal."""
    return next((step for step, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)


def compare(trials: Mapping[str, tuple[str, Sequence[object]]]) -> list[Comparison]:
    """Compare trials of the same length that should be equal: by name, the numerics and the digests."""
    kinds: dict[str, list[list[str]]] = defaultdict(list)
    for name, (numerics, digests) in trials.items():
        alike = next((each for each in kinds[numerics] if trials[each[0]][1] == digests), None)
        kinds[numerics].append([name]) if alike is None else alike.append(name)
    found: list[Comparison] = []
    for numerics, sets in kinds.items():
        sets.sort(key=len, reverse=True)
        first, others = trials[sets[0][0]][1], [name for each in sets[1:] for name in each]
        majority = len(sets[0]) > len(others)
        outliers = {name: first_difference(first, trials[name][1]) or 0 for name in others if majority}
        found.append(Comparison(numerics, sets, majority, outliers))
    return found


def judge(about: Document, passes: Sequence[Sequence[Document]], together: bool) -> dict[str, Any]:
    """Return the document of one host.

    Args:
        about: What is known of the host and of the configuration.
        passes: For each of two passes, what each rank has found: "numerics", "data" and, by step, the "digests" of
            all tensors by name.
        together: Whether the ranks are one replica; else each has trained the same, alone.
    """
    found: list[tuple[int, int, list[str]]] = []
    for rank, (one, other) in enumerate(zip(*passes, strict=True)):
        step = first_difference(one["digests"], other["digests"])
        if step is not None:
            before, after = one["digests"][step], other["digests"][step]
            found.append((step, rank, [name for name in before if before[name] != after[name]]))
    step, rank, tensors = min(found, default=(0, 0, []))
    difference = {"step": step, "rank": rank, "tensor": tensors[0], "tensors": len(tensors)} if found else None
    trials = {str(n): (one["numerics"], [*map(digest, one["digests"])]) for n, one in enumerate(passes[0])}
    ranks = [] if together else compare({f"rank {n}": trial for n, trial in trials.items()})
    return {
        **about,
        "together": together,
        "data": passes[0][0]["data"],
        "numerics": "; ".join(sorted({numerics for numerics, _ in trials.values()})),
        "reproducible": not found,
        "first_difference": difference,
        "ranks": [asdict(each) for each in ranks],
        "ok": not found and all(len(each.sets) == 1 for each in ranks),
        "digests": {n: digests for n, (_, digests) in trials.items()},
    }


def lines(host: Document) -> list[str]:
    """Return the document of one host in words."""
    name, at, ranks = host["host"], host["first_difference"], [Comparison(**each) for each in host["ranks"]]
    if host["ok"]:
        how = "together" if host["together"] else "each alone"
        who = f"{len(host['digests'])} ranks, {how}, trained {host['steps']} steps twice"
        return [f"{name}: reproducible: {who} to the same bits ({host['numerics']})"]
    found = [f"{name}: {line}" for each in ranks if len(each.sets) > 1 for line in each.lines]
    if at is None:
        return found
    more = f" and {at['tensors'] - 1} more" if at["tensors"] > 1 else ""
    where = f"rank {at['rank']} differs between two passes since step {at['step']}: {at['tensor']}{more}"
    return [f"{name}: NOT REPRODUCIBLE: {where}", *found]


def judge_all(hosts: Mapping[str, Document]) -> tuple[dict[str, Any], list[str]]:
    """Compare the documents of several hosts, of one configuration, by name.

    Returns:
        What was found, as JSON and in words. A host that is at fault by itself is compared with no other.
    """
    trials: dict[str, tuple[str, Sequence[object]]] = {}
    for name, host in hosts.items():
        if host["ok"]:  # ranks that have trained alone are equal then, and hosts may have unequally many
            ranks = [tuple(digests) for digests in host["digests"].values()]
            different = ranks if host["together"] else dict.fromkeys(ranks)
            trials[name] = host["numerics"], [*zip(*different, strict=True)]
    faulty, compared = [name for name in hosts if name not in trials], compare(trials)
    said = [line for name in faulty for line in lines({**hosts[name], "host": name})]
    ok = not faulty and all(len(each.sets) == 1 for each in compared)
    document = {"ok": ok, "faulty": faulty, "compared": [asdict(each) for each in compared]}
    return document, said + [line for each in compared for line in each.lines]

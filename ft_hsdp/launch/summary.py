"""The job in figures: summary.json, from what the replicas logged. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from ft_hsdp.config import Config
from ft_hsdp.launch.failures import failures
from ft_hsdp.launch.rundir import Row

Summary = dict[str, Any]


def summarize(
    config: Config,
    rows: Sequence[Row],
    fed: Mapping[int, Sequence[Row]],
    finals: Mapping[int, Row],
    events: Sequence[Row],
    lost: Sequence[int] = (),
) -> Summary:
    """The summary of a run.

    rows: canonical commit rows, by step. fed: per replica, what it logged before each forward.
    finals: per replica, its final.json. events: of all processes. lost: replicas past their budget.
    """
    typical = fault_free_step(rows)
    wall = wall_s(rows)
    useful = sum(typical * len(row["contributors"]) / row["total"] for row in rows)
    lived = {e["replica"] for e in events if e["event"] == "ReplicaStarted"}
    ids = sorted({*range(config.replicas), *lived})
    losses = [row["loss"] for row in rows]
    window = max(1, len(rows) // 10)
    summary: Summary = {
        "steps": rows[-1]["step"] if rows else 0,
        "loss_first": _mean(losses[:window]),
        "loss_last": _mean(losses[-window:]),
        "wall_s": wall,
        "tokens": sum(row["tokens"] for row in rows),
        "effective_training_ratio": useful / wall if wall > 0 else 0.0,
        "stall_s": stalls(rows),
        "replicas": {str(r): _replica(r, rows, finals.get(r), events) for r in ids},
        "batches": batches(rows, fed, _cut(events)),
        "failures": failures(rows, events, typical),
    }
    if lost:
        summary["lost"] = sorted(lost)
    if unplaced := _unplaced(events):
        summary["unplaced"] = unplaced
    return summary


def _cut(events: Sequence[Row]) -> list[str]:
    """The incarnations whose rank 0, which logs what is fed, took its last lines along."""
    return [e["incarnation"] for e in events if e["event"] == "LogCut" and e["rank"] == 0]


def _unplaced(events: Sequence[Row]) -> list[int]:
    """The replicas that had no place at the end."""
    told = {e["replica"]: e["event"] for e in events if e["event"] in ("ReplicaUnplaced", "ReplicaStarted")}
    return sorted(replica for replica, event in told.items() if event == "ReplicaUnplaced")


def fault_free_step(rows: Sequence[Row]) -> float:
    """The median time in seconds of a step to which all replicas that were wanted contributed."""
    whole = [row["step_s"] for row in rows if len(row["contributors"]) == row["total"]]
    some = whole or [row["step_s"] for row in rows]
    return float(median(some)) if some else 0.0


def wall_s(rows: Sequence[Row]) -> float:
    """Seconds from the start of the first step to the last commit."""
    return float(rows[-1]["t"] - rows[0]["t"] + rows[0]["step_s"]) if rows else 0.0


def stalls(rows: Sequence[Row]) -> dict[str, float]:
    """Exposed waits in seconds, by cause, over all steps."""
    sums: Counter[str] = Counter()
    for row in rows:
        sums.update(row["waits"])
    return {cause: float(seconds) for cause, seconds in sorted(sums.items())}


def batches(rows: Sequence[Row], fed: Mapping[int, Sequence[Row]], cut: Sequence[str] = ()) -> dict[str, int]:
    """How many batches were trained, how many of them twice, how many never.

    A batch is trained when a canonical commit lists it *and* its replica logged, for that very step, that
    it fed it: so the ledger is checked against what the model really saw. A resumed run begins where the ledger
    before its first step stands, and what is a hole at the end is left out, not skipped.

    cut: incarnations whose node is gone with the last lines that they wrote. A batch that a commit lists, and
    whose line can only have been among those, is neither trained nor skipped: it is `unlogged`, a key that is
    there where there is such a batch.
    """
    seen = {(r, f["step"], f["shard"], f["index"]) for r, lines in fed.items() for f in lines}
    gaps = {r: _gaps(lines, [name for name in cut if _life(name)[0] == r]) for r, lines in fed.items()}
    unlogged: Counter[tuple[int, int]] = Counter()
    claimed: dict[int, set[int]] = {}  # data shard -> indices that the commits list
    trained: Counter[tuple[int, int]] = Counter()
    for row in rows:
        for c in row["contributions"]:
            if c["weight"] <= 0:
                continue
            claimed.setdefault(c["shard"], set()).add(c["index"])
            if (c["replica"], row["step"], c["shard"], c["index"]) in seen:
                trained[c["shard"], c["index"]] += 1
            elif any(first < row["step"] < end for first, end in gaps.get(c["replica"], ())):
                unlogged[c["shard"], c["index"]] += 1
    holes = _holes(rows[-1]) if rows else set()
    skipped = 0
    for shard, indices in claimed.items():
        for index in _untrained(rows[0], shard, max(indices) + 1):
            skipped += all((shard, index) not in known for known in (trained, unlogged, holes))
    return {
        "trained": len(trained),
        "duplicated": sum(times > 1 for times in (trained + unlogged).values()),
        "skipped": skipped,
        **({"unlogged": len(unlogged.keys() - trained.keys())} if unlogged else {}),
    }


def _gaps(fed: Sequence[Row], cut: Sequence[str]) -> list[tuple[int, float]]:
    """The steps (after, before) whose lines a replica may have lost: between the last line of an incarnation whose
    log was cut, or of one before it, and the first line of a later one."""
    lives = [(_life(row["incarnation"])[1], row["step"]) for row in fed] if cut else []
    found = []
    for _, life in map(_life, cut):
        after = max((step for n, step in lives if n <= life), default=0)
        found.append((after, min((step for n, step in lives if n > life), default=math.inf)))
    return found


def _life(incarnation: str) -> tuple[int, int]:
    """Replica and number of restarts in an incarnation's name, REPLICA-RUN-RESTARTS."""
    replica, _, rest = incarnation.partition("-")
    return int(replica), int(rest.rpartition("-")[2])


def _untrained(first: Row, shard: int, end: int) -> Iterator[int]:
    """The batches of a data shard below `end` that were not inside the state before the `first` row's step."""
    if first["step"] == 1:
        yield from range(end)
        return
    cursor = first["cursors"][shard]
    own = {c["index"] for c in first["contributions"] if c["shard"] == shard}
    yield from sorted(own | {index for s, index in _holes(first) if s == shard})
    yield from range(cursor, end)


def _holes(row: Row) -> set[tuple[int, int]]:
    """The batches (data shard, index) that were left out up to a row, to be trained later."""
    return {(shard, index) for shard, index in row["holes"]}


def _replica(replica: int, rows: Sequence[Row], final: Row | None, events: Sequence[Row]) -> Row:
    """How one replica ended; without its final state, what it last contributed to."""
    last = max((row["step"] for row in rows if replica in row["contributors"]), default=0)
    starts = sum(e["event"] == "ReplicaStarted" and e["replica"] == replica for e in events)
    end = final or {"step": last, "lineage": "", "digest": ""}
    return {**{key: end[key] for key in ("step", "lineage", "digest")}, "incarnations": starts}


def _mean(values: Sequence[float]) -> float:
    """The mean of what is finite: a step that was skipped may have no loss."""
    finite = [value for value in values if math.isfinite(value)]
    return float(sum(finite) / len(finite)) if finite else 0.0

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ft_hsdp.analysis.failures import Failures
from ft_hsdp.config import Config
from ft_hsdp.jsonl import LineWriter
from ft_hsdp.launch.run.audit import UnitAudit
from ft_hsdp.launch.run.directory import Row
from ft_hsdp.launch.run.summary import RunTally, Summary


def written(path: Path, *rows: Row) -> None:
    """Append lines to a log of a run."""
    log = LineWriter(path)
    for row in rows:
        log.write(row)
    log.close()


def commit(
    step: int,
    *,
    lineage: str = "",
    prev: str = "",
    who: Sequence[int] = (0, 1, 2),
    role: str = "contribute",
    epoch: int = 1,
    t: float | None = None,
    ranks: int = 1,
    **fields: Any,
) -> Row:
    """A row of commits.jsonl. Lineages are L1, L2, ...; replica r trains the next units of data shard r."""
    one = {"weight": ranks, "index": (step - 1) * ranks, "loss": 2.0, "units": ranks, "part": 0}
    contributions = [{**one, "replica": r, "shard": r} for r in who]
    return {
        "t": 1000.0 + step if t is None else t,
        "step": step,
        "epoch": epoch,
        "attempt": 0,
        "lineage": lineage or f"L{step}",
        "prev": prev or f"L{step - 1}",
        "ring": [0, 1, 2],
        "contributors": sorted(who),
        "total": 3,
        "units": len(who) * ranks,
        "units_wanted": fields.get("total", 3) * ranks,
        "contributions": contributions,
        "cursors": [step] * 3,
        "holes": [],
        "loss": 3.0 - step / 100,
        "lr": 1e-3,
        "lr_scale": 1.0,
        "norm": 1.0,
        "step_s": 1.0,
        "waits": {"ring": 0.25},
        "ftar_bytes": 10,
        "ftar_s": 0.1,
        "tokens": 100,
        "incarnation": "0-aaaaaaaa-0",
        "role": role,
        **fields,
    }


def fed(rows: Sequence[Row]) -> dict[int, list[Row]]:
    """The logs of what was fed that fit `rows`."""
    logs: dict[int, list[Row]] = {}
    for row in rows:
        for c in row["contributions"]:
            line = {
                "t": row["t"],
                "step": row["step"],
                "shard": c["shard"],
                "index": c["index"],
                "units": c["units"],
            }
            logs.setdefault(c["replica"], []).append({**line, "incarnation": "x"})
    return logs


def event(name: str, t: float, **fields: Any) -> Row:
    return {"t": t, "event": name, "source": "supervisor", "reason": "because", **fields}


def fold(slots: int, events: Iterable[Row], commits: Iterable[Row]) -> Failures:
    """The failures of a run, from events and canonical commits in any order."""
    failures = Failures(slots, most=None)
    for seq, row in enumerate(sorted((*events, *commits), key=lambda row: row["t"]), 1):
        if "event" in row:
            failures.event(seq, row["event"], row)
        else:
            failures.commit(row["t"], row["epoch"], row["contributors"])
    return failures


def failures(rows: Sequence[Row], events: Sequence[Row], typical: float) -> list[Row]:
    """The failures of a run, whose fault-free step takes `typical` seconds, as its summary tells them."""
    found = fold(8, events, rows)
    return [found.account(failure, typical) for failure in found.losses()]


def summarize(
    config: Config,
    rows: Iterable[Row],
    fed: Mapping[int, Iterable[Row]],
    finals: Mapping[int, Row],
    events: Iterable[Row],
    lost: Iterable[int] = (),
) -> Summary:
    """The summary of a run whose rows are in memory: canonical commits by step, lines per replica, all events."""
    tally = RunTally(config)
    for replica, lines in fed.items():
        for line in lines:
            tally.fed(replica, line)
    for event in sorted(events, key=lambda e: e["t"]):
        tally.event(event)
    for row in rows:
        tally.commit(row)
    return tally.summary(finals, lost)


def batches(
    rows: Iterable[Row],
    fed: Mapping[int, Sequence[Row]],
    cut: Sequence[str] = (),
    losses: Sequence[tuple[float, float]] = (),
) -> dict[str, int]:
    """The audit of rows that are all in memory. cut: incarnations whose machine took their last lines along;
    losses: when a disk took no lines, (from, to) in Unix seconds."""
    audit = UnitAudit(1)
    for name in cut:
        audit.event({"event": "LogCut", "rank": 0, "incarnation": name})
    for since, until in losses:
        audit.lost(since, until)
    for replica, lines in fed.items():
        for line in lines:
            audit.fed(replica, line)
    for row in rows:
        audit.commit(row)
    return audit.result()

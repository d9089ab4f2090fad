"""Live progress: a line a step into a pipe, a table on a terminal; readable at 80 columns."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Any, TextIO, cast

from rich import box
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from ft_hsdp.config import Config
from ft_hsdp.jsonl import DISK
from ft_hsdp.launch.run.directory import Row
from ft_hsdp.launch.run.explain import NOTABLE
from ft_hsdp.launch.run.summary import Summary
from ft_hsdp.sentences import fault, tell

SHOWN_STEPS = 10
LONG_S = 3.0  # a wait longer than this is shown
HELD_S = 2.0  # an event about a later step waits this long for the lines of the steps before it
_BAD = {
    "FailureInjected",
    "ProcessExited",
    "RingBroken",
    "EvictionOrdered",
    "ReplicaLost",
    "LighthouseExited",
}
_GOOD = {"FetchCompleted", "LighthouseRestarted"}


class _Forgiving:
    """A stream into a file whose disk may be full: what that does not take is not shown."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write what can be written."""
        try:
            self._stream.write(text)
        except OSError as error:
            if error.errno not in DISK:
                raise
        return len(text)

    def flush(self) -> None:
        """Write what can be written."""
        try:
            self._stream.flush()
        except OSError as error:
            if error.errno not in DISK:
                raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Terminal:
    """Shows a running job on `stream`; a context, for the table is taken away at the end."""

    def __init__(self, config: Config, stream: TextIO, *, live: bool | None = None) -> None:
        self._steps = config.train.steps
        self._console = Console(
            file=cast(TextIO, _Forgiving(stream)), highlight=False, soft_wrap=True, force_terminal=live
        )
        self._rows: deque[Row] = deque(maxlen=SHOWN_STEPS)
        self._failed_at: dict[int, float] = {}  # replica -> time of its last failure
        self._said: set[tuple[object, ...]] = set()
        self._waiting: Row | None = None  # what the lighthouse waits for, until that is news
        self._held: list[Row] = []  # events about steps whose predecessors are not shown yet
        self._leaving: set[object] = set()  # replicas that were told to leave
        on_terminal = self._console.is_terminal if live is None else live
        self._live = Live(self._table(), console=self._console, transient=True, auto_refresh=False)
        self._on_terminal = on_terminal

    def __enter__(self) -> Terminal:
        if self._on_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._on_terminal:
            self._live.stop()

    def say(self, text: str, style: str = "") -> None:
        """Print one line."""
        self._console.print(escape(text), style=style)

    def commit(self, row: Row) -> None:
        """Show a committed step."""
        self._waiting = None
        before = self._rows[-1]["contributors"] if self._rows else row["contributors"]
        self._rows.append(row)
        if self._on_terminal:
            self._live.update(self._table(), refresh=True)
        else:
            self.say(step_line(row, self._steps))
        self._let_through(row["step"])
        for replica in sorted(set(row["contributors"]) - set(before)):
            self._tell(row["t"], f"replica {replica} contributes again at step {row['step']}", replica, "green")

    def event(self, event: Row) -> None:
        """Show a failure, its detection, a fetch, a rejoin; other events only stand in events.jsonl.

        Events and commits arrive independently. An event about a later step is shown after the line of the step
        before it.
        """
        step = event.get("step")
        if self._rows and isinstance(step, int) and step > self._rows[-1]["step"] + 1:
            self._held.append(event)
        else:
            self._show(event)

    def _let_through(self, step: float) -> None:
        """Show the held events that are about the step after ``step``, or an earlier one."""
        due = [event for event in self._held if event["step"] <= step + 1]
        self._held = [event for event in self._held if event not in due]
        for event in due:
            self._show(event)

    def _show(self, event: Row) -> None:
        name, replica = event["event"], event.get("replica")
        if name in ("Waiting", "EpochGranted"):
            self._waiting = event if name == "Waiting" else None
        if name == "LeaveRequested":
            self._leaving.add(replica)
        elif name == "ReplicaStarted":
            self._leaving.discard(replica)
        left = event.get("kind") == "exit 0" or (event.get("kind") == "exit 143" and replica in self._leaving)
        if name not in NOTABLE or (name == "ProcessExited" and left):
            return
        if name == "RingBroken" and not self._first("RingBroken", event.get("epoch")):
            return  # every rank of every survivor sees it
        if name in ("FailureInjected", "ProcessExited"):
            known = self._failed_at.get(replica, 0.0) if isinstance(replica, int) else 0.0
            if isinstance(replica, int) and event["t"] - known > 1.0:
                self._failed_at[replica] = event["t"]
        about = event.get("suspect") if name == "RingBroken" else replica
        style = "red" if name in _BAD else "green" if name in _GOOD else "dim"
        if name in WITH_REASON:  # its first clause; events.jsonl has the rest
            event = {**event, "reason": str(event["reason"]).partition(";")[0]}
        text = tell(event, reason=name in WITH_REASON)
        self._tell(event["t"], text, None if name == "FailureInjected" else about, style)

    def tick(self, now: float) -> None:
        """Say what the job waits for, where that takes long; show what was held too long. now: Unix seconds."""
        if any(now - event["t"] > HELD_S for event in self._held):
            self._let_through(math.inf)
        if self._waiting is not None and now - self._waiting["t"] > LONG_S:
            self._tell(self._waiting["t"], tell(self._waiting), None, "yellow")
            self._waiting = None

    def summary(self, summary: Summary, code: int) -> None:
        """Show the end of the job."""
        self._let_through(math.inf)
        table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
        table.add_column(style="dim")
        table.add_column()
        for name, value in summary_lines(summary, self._steps):
            table.add_row(name, escape(value), style="" if code == 0 or name != "lost" else "red")
        self._console.print(table)

    def _tell(self, t: float, text: str, about: object, style: str) -> None:
        """Print one line, with the time since the last failure of the replica that it is about."""
        since = self._failed_at.get(about) if isinstance(about, int) else None
        late = "" if since is None else f" (+{max(0.0, t - since):.3f} s)"
        clock = time.strftime("%H:%M:%S", time.localtime(t))
        self.say(f"{clock} {text}{late}", style)

    def _first(self, *key: object) -> bool:
        new = key not in self._said
        self._said.add(key)
        return new

    def _table(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in ("step", "loss", "step s", "healthy", "epoch", "lr scale", "tokens/s"):
            table.add_column(name, justify="right")
        for row in self._rows:
            cells = _cells(row)
            style = "" if len(row["contributors"]) == row["total"] else "yellow"
            table.add_row(f"{row['step']}/{self._steps}", *cells, style=style)
        return table


WITH_REASON = frozenset(
    {"ReplicaLost", "ReplicaUnplaced", "EvictionOrdered", "Waiting", "FetchRejected", "EpochGranted", "LeftBehind"}
)


def step_line(row: Row, steps: int) -> str:
    """A committed step as one line of at most 80 characters."""
    loss, seconds, healthy, epoch, scale, rate = _cells(row)
    width = len(str(steps))
    return (
        f"step {row['step']:>{width}}/{steps}  loss {loss}  {seconds} s  healthy {healthy}"
        f"  epoch {epoch}  lr x{scale}  {rate} tok/s"
    )


def _cells(row: Row) -> tuple[str, ...]:
    rate = row["tokens"] / row["step_s"] if row["step_s"] > 0 else 0.0
    return (
        f"{row['loss']:.4f}" if row["loss"] is not None else "-",
        f"{row['step_s']:.2f}",
        f"{len(row['contributors'])}/{row['total']}",
        str(row["epoch"]),
        f"{row['lr_scale']:.2f}",
        f"{rate:.0f}" if rate < 1e5 else f"{rate / 1e3:.0f}k",
    )


MANY = 5  # failures from which on their spread says more than each of them
SPREADS = (("seen after", "detect_s"), ("stall", "stall_s"), ("back after", "rejoin_s"))


def summary_lines(summary: Summary, steps: int | None = None) -> list[tuple[str, str]]:
    """The figures that a user wants to see at the end, by name; ``steps``: of the whole job, if that is known."""
    batches = summary["batches"]
    ended = [r for r in summary["replicas"].values() if r["digest"]]
    states = {(r["step"], r["lineage"], r["digest"]) for r in ended}
    if not ended and steps is not None and summary["steps"] < steps:
        state = f"stopped after step {summary['steps']} of {steps}; only checkpoints are kept"
    elif not ended:
        state = "no replica holds the final state"
    elif len(states) == 1:
        away = len(summary["replicas"]) - len(ended)
        state = f"all {len(ended)} replicas equal, digest {ended[0]['digest'][:16]}"
        state += f", {away} away" if away else ""
    else:
        state = f"{len(states)} different states"
    lines = [
        ("steps", str(summary["steps"])),
        (
            "loss",
            f"{summary['loss_first']:.4f} -> {summary['loss_last']:.4f}, means of the first and the last tenth",
        ),
        ("time", f"{summary['wall_s']:.1f} s, {summary['effective_training_ratio']:.1%} of it effective"),
        ("final state", state),
        (
            "batches",
            f"{batches['trained']} trained, {batches['duplicated']} twice, {batches['skipped']} skipped"
            + (f", {batches['unlogged']} in logs that are gone" if "unlogged" in batches else ""),
        ),
    ]
    for failure in summary["failures"]:
        lines.append(("failure", _failure(failure)))
    if len(summary["failures"]) >= MANY:
        known = {key: [f[key] for f in summary["failures"] if f[key] is not None] for _, key in SPREADS}
        lines += [(name, _spread(known[key])) for name, key in SPREADS]
    if summary.get("lost"):
        lines.append(("lost", "replicas " + ", ".join(map(str, summary["lost"]))))
    if summary.get("unplaced"):
        lines.append(("no place", "replicas " + ", ".join(map(str, summary["unplaced"]))))
    return lines


def _spread(seconds: Sequence[float]) -> str:
    """Median, 90th percentile and maximum of some times in seconds."""
    ordered = sorted(seconds)
    if not ordered:
        return "unknown"
    high = ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
    return f"p50 {statistics.median(ordered):.3f} s, p90 {high:.3f} s, max {ordered[-1]:.3f} s ({len(ordered)})"


def _failure(failure: Row) -> str:
    back = failure["rejoin_s"] if failure.get("back", True) else None
    seen = "unknown" if failure["detect_s"] is None else f"{failure['detect_s'] * 1e3:.0f} ms"
    rank = "" if failure["rank"] is None else f" rank {failure['rank']}"
    return (
        f"replica {failure['replica']}{rank} {fault(failure['kind'])}: seen {seen}, "
        f"stall {failure['stall_s']:.2f} s, " + (f"back {back:.1f} s" if back is not None else "not back")
    )

"""What `up` shows while it runs: a table on a terminal, a line for each step in a pipe; 80 columns are enough."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import TextIO

from rich import box
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from ft_hsdp.config import Config
from ft_hsdp.event_table import EVENTS, fault, is_over, tell
from ft_hsdp.launch.run.directory import Row
from ft_hsdp.launch.run.summary import Summary

SHOWN_STEPS = 10  # rows of the table
LONG_S = 3.0  # a wait of the lighthouse that is longer than this is shown
HELD_S = 2.0  # longest time for which an event about a later step waits for the lines of the steps before it


class Terminal:
    """Shows a running job; a context manager, which removes the table at the end."""

    def __init__(self, config: Config, stream: TextIO, *, live: bool | None = None) -> None:
        """Make the display.

        Args:
            stream: Where it is shown; its errors are the caller's (`lifetime.forgiving`).
            live: Whether to show a table; None: if the stream is a terminal.
        """
        self._steps = config.train.steps
        self._constant = config.quorum.batch == "constant"
        self._console = Console(file=stream, highlight=False, soft_wrap=True, force_terminal=live)
        self._rows: deque[Row] = deque(maxlen=SHOWN_STEPS)
        self._failed_at: dict[int, float] = {}  # replica -> time of its last failure
        self._broken: set[object] = set()  # epochs whose broken ring was shown
        self._gone: set[object] = set()  # incarnations of which it was shown that a rank is gone
        self._waiting: Row | None = None  # the lighthouse's newest Waiting, until it is over or was shown
        self._held: list[Row] = []  # events about a later step than the next one that is shown
        self._contributed: set[int] = set()  # replicas that have contributed
        self._once: set[str] = set()  # sentences that every replica says
        self._leaving: set[object] = set()  # replicas that were told to leave
        self._live = Live(self._table(), console=self._console, transient=True, auto_refresh=False)
        self._on_terminal = self._console.is_terminal if live is None else live

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
        self._console.print(escape(text), style=style)

    def commit(self, row: Row) -> None:
        """Show a committed step."""
        self._waiting = None
        before = self._rows[-1]["contributors"] if self._rows else row["contributors"]
        self._rows.append(row)
        if self._on_terminal:
            self._live.update(self._table(), refresh=True)
        else:
            self.say(step_line(row, self._steps, self._constant))
        self._show_held(row["step"])
        for replica in sorted(set(row["contributors"]) - set(before)):
            again = " again" if replica in self._contributed or replica in self._failed_at else ""
            self._tell(row["t"], f"replica {replica} contributes{again} at step {row['step']}", replica, "green")
        self._contributed.update(row["contributors"])

    def event(self, event: Row) -> None:
        """Show an event if it is a failure, or news of a recovery; events.jsonl has all of them.

        Events and commits arrive independently. An event about a later step is shown after the line of the step
        before it.
        """
        step = event.get("step")
        if self._rows and isinstance(step, int) and step > self._rows[-1]["step"] + 1:
            self._held.append(event)
        else:
            self._show(event)

    def _show_held(self, step: float) -> None:
        """Show the held events about the step after `step`, or an earlier one."""
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
        kind = EVENTS.get(name)
        if kind is None or not kind.told or (name == "ProcessExited" and left) or event.get("prevented"):
            return
        if name == "RingBroken":
            if event.get("epoch") in self._broken:
                return  # every rank of every survivor reports it
            self._broken.add(event.get("epoch"))
        if name == "ProcessExited" and (incarnation := event.get("incarnation")) is not None:
            if incarnation in self._gone:
                return  # each of its hosts reports it
            self._gone.add(incarnation)
        if name in ("FailureInjected", "ProcessExited"):
            known = self._failed_at.get(replica, 0.0) if isinstance(replica, int) else 0.0
            if isinstance(replica, int) and event["t"] - known > 1.0:
                self._failed_at[replica] = event["t"]
        about = event.get("suspect") if name == "RingBroken" else replica
        good = kind.good or (kind.grave and is_over(event))
        style = "green" if good else "red" if kind.grave else "dim"
        text = tell({**event, "reason": _told_reason(event)})
        if kind.once:
            if text in self._once:
                return
            self._once.add(text)
        self._tell(event["t"], text, None if name == "FailureInjected" else about, style)

    def tick(self, now: float) -> None:
        """Show what the job waits for if that takes long, and events that were held too long; `now`: Unix s."""
        if any(now - event["t"] > HELD_S for event in self._held):
            self._show_held(math.inf)
        if self._waiting is not None and now - self._waiting["t"] > LONG_S:
            self._tell(self._waiting["t"], tell(self._waiting), None, "yellow")
            self._waiting = None

    def summary(self, summary: Summary, code: int) -> None:
        """Show the summary of the job, which ends with exit code `code`."""
        self._show_held(math.inf)
        lines = summary_lines(summary, self._steps)
        width = max(len(name) for name, _ in lines)
        self.say("")
        for name, value in lines:  # no table: that would break lines at 80 characters where there is no terminal
            style = "" if code == 0 or name != "lost" else "red"
            self._console.print(f" [dim]{name:<{width}}[/]   {escape(value)}", style=style)
        self.say("")

    def _tell(self, t: float, text: str, about: object, style: str) -> None:
        """Print one line, with the time since the last failure of replica `about`."""
        since = self._failed_at.get(about) if isinstance(about, int) else None
        late = "" if since is None else f" (+{max(0.0, t - since):.3f} s)"
        clock = time.strftime("%H:%M:%S", time.localtime(t))
        self.say(f"{clock} {text}{late}", style)

    def _table(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in ("step", "loss", "step s", "healthy", "units", "epoch", "lr scale", "tokens/s"):
            table.add_column(name, justify="right")
        for row in self._rows:
            cells = _cells(row)
            style = "" if len(row["contributors"]) == row["total"] else "yellow"
            table.add_row(f"{row['step']}/{self._steps}", *cells, style=style)
        return table


WITH_REASON = frozenset(  # the first clause is shown
    {
        *("ReplicaUnplaced", "EvictionOrdered", "Waiting", "FetchRejected", "EpochGranted"),
        *("LeftBehind", "BatchReduced", "DamagedFileSetAside", "JobFilePutBack"),
    }
)
QUOTING = frozenset(
    {"ProcessExited", "ReplicaLost", "StartPrevented", "JobGivenUp", "BatchBlamed", "BatchLeftOut"}
)  # they quote an error
LONGEST = 300  # characters of such a reason that are shown


def _told_reason(event: Row) -> str:
    """Return what is shown of the reason of an event; events.jsonl has all of it."""
    name, reason = event["event"], str(event.get("reason", ""))
    if name == "ProcessExited" and str(event.get("kind")).startswith("exit "):
        reason = reason.partition(": ")[2]  # before that stands what the sentence says
    elif name == "ProcessExited" or name not in WITH_REASON | QUOTING:
        return ""
    elif name not in QUOTING:
        return reason.partition(";")[0]
    return reason if len(reason) <= LONGEST else reason[: LONGEST - 3] + "..."


def step_line(row: Row, steps: int, constant: bool = False) -> str:
    """Return a committed step as one line of at most 80 characters.

    Args:
        constant: With `quorum.batch: constant` the line shows the units of the step, and not the epoch.
    """
    loss, seconds, healthy, units, epoch, scale, rate = _cells(row)
    width = len(str(steps))
    what = f"units {units}" if constant else f"epoch {epoch}"
    return (
        f"step {row['step']:>{width}}/{steps}  loss {loss}  {seconds} s  healthy {healthy}"
        f"  {what}  lr x{scale}  {rate} tok/s"
    )


def _cells(row: Row) -> tuple[str, ...]:
    rate = row["tokens"] / row["step_s"] if row["step_s"] > 0 else 0.0
    return (
        f"{row['loss']:.4f}" if row["loss"] is not None else "-",
        f"{row['step_s']:.2f}",
        f"{len(row['contributors'])}/{row['total']}",
        f"{row['units']}/{row['units_wanted']}",
        str(row["epoch"]),
        f"{row['lr_scale']:.2f}",
        f"{rate:.0f}" if rate < 1e5 else f"{rate / 1e3:.0f}k",
    )


MANY = 5  # from so many failures on, the summary has their distributions too
SPREADS = (("seen after", "detect_s"), ("stall", "stall_s"), ("back after", "rejoin_s"))


def summary_lines(summary: Summary, steps: int | None = None) -> list[tuple[str, str]]:
    """Return the figures that `up` shows at the end as (name, value).

    Args:
        steps: Number of steps of the whole job; None if it is not known.
    """
    units = summary["batches"]
    ended = [r for r in summary["replicas"].values() if r["digest"] and r["step"] >= summary["steps"]]
    states = {(r["step"], r["lineage"], r["digest"]) for r in ended}
    if not ended and steps is not None and summary["steps"] < steps:
        state = f"stopped after step {summary['steps']} of {steps}; only checkpoints are kept"
    elif not ended:
        state = "no replica holds the final state"
    elif len(states) == 1:
        away = len(summary["replicas"]) - len(ended)
        but = " but for what is in doubt" if summary.get("doubted") else ""
        state = f"all {len(ended)} replicas equal{but}, digest {ended[0]['digest'][:16]}"
        state += f", {away} away" if away else ""
    else:
        state = f"{len(states)} different states"
    lines = [
        ("steps", str(summary["steps"])),
        ("loss", _losses(summary)),
        ("time", f"{summary['wall_s']:.1f} s, {summary['effective_training_ratio']:.1%} of it effective"),
        ("final state", state),
        (
            "units",
            f"{units['trained']} trained, {units['duplicated']} twice, {units['skipped']} skipped"
            + (f", {units['given_up']} given up" if "given_up" in units else "")
            + (f", {units['unlogged']} in logs that are gone" if "unlogged" in units else ""),
        ),
    ]
    if doubted := summary.get("doubted"):
        more = f" and {len(doubted) - 1} more" if doubted[1:] else ""
        lines.append(("in doubt", f"{doubted[0]}{more}: replicas may differ in it (JobDoubted)"))
    for failure in summary["failures"]:
        lines.append(("failure", _failure(failure)))
    if len(summary["failures"]) >= MANY:
        counted = {key: [f for f in summary["failures"] if f[key] is not None] for _, key in SPREADS}
        counted["rejoin_s"] = [f for f in counted["rejoin_s"] if f.get("back", True)]
        known = {key: [f[key] for f in of] for key, of in counted.items()}
        lines += [(name, _spread(known[key])) for name, key in SPREADS]
    if summary.get("lost"):
        lines.append(("lost", "replicas " + ", ".join(map(str, summary["lost"]))))
    if summary.get("unplaced"):
        lines.append(("no place", "replicas " + ", ".join(map(str, summary["unplaced"]))))
    return lines


def _losses(summary: Summary) -> str:
    if not summary["steps"]:
        return "none: no step was committed"
    first, last = summary["loss_first"], summary["loss_last"]
    if first == last == 0.0:  # the means of no values
        return "none was told"
    return f"{first:.4f} -> {last:.4f}, means of the first and the last tenth"


def _spread(seconds: Sequence[float]) -> str:
    """Return the median, the 90th percentile and the maximum of times in seconds, in words."""
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

"""Exporters: the job's curves for TensorBoard and Weights & Biases, each written by a thread of its own.

The journal hands rows over without waiting, so a full disk or a lost network costs points of a curve, never a
decision. A file beside each curve (`WRITTEN`) says up to which row it was written, so that a lighthouse that is
started again writes no point twice.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import secrets
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ft_hsdp.errors import ConfigError
from ft_hsdp.jsonl import clear_way, is_finite, parsed, read_regular, replace_json, set_aside
from lighthouse.journal.database import SqliteDatabase

SAVE_S = 5.0  # between two writes
CLOSE_S = 2.0  # longest time of the last write
WAITING = 20_000  # newest points that wait to be written; older ones are dropped
READ = 500  # rows of the journal that one read takes
YIELD_S = 0.005  # between two such reads, so that the lighthouse is not delayed
WRITTEN = "written.json"
LOGGED_STEP = "logged_step"  # the axis of logged values at W&B

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Point:
    """The figures of one committed step, or values that a training loop has logged of it."""

    seq: int  # its number in the journal
    step: int
    t: float  # Unix seconds
    values: dict[str, float]  # by the name of the curve
    logged: bool = False

    @staticmethod
    def of(seq: int, row: Mapping[str, Any]) -> Point:
        """Return the point of a commit row, without figures that are missing or not finite."""
        contributors = row.get("contributors")
        healthy = len(contributors) if isinstance(contributors, Sequence) else None
        figures = {
            **{name: row.get(name) for name in ("loss", "lr", "lr_scale", "step_s", "units", "units_wanted")},
            "healthy": healthy,
            "gbps": _ratio(row.get("ftar_bytes"), row.get("ftar_s"), 1e-9),
            "tokens_per_s": _ratio(row.get("tokens"), row.get("step_s")),
        }
        return Point(seq, int(row["step"]), float(row["t"]), _finite(figures))

    @staticmethod
    def of_logged(seq: int, row: Mapping[str, Any]) -> Point:
        return Point(seq, int(row["step"]), float(row["t"]), _finite(row["values"]), True)


def _finite(figures: Mapping[str, object]) -> dict[str, float]:
    return {name: float(v) for name, v in figures.items() if is_finite(v)}


def _ratio(amount: Any, seconds: Any, unit: float = 1.0) -> float | None:
    """Return ``amount`` per second, in units of 1 / ``unit``; None if one of them is unknown."""
    if not (is_finite(amount) and is_finite(seconds)) or not seconds > 0:
        return None
    return float(amount / seconds * unit)


POINTS = {"commit": Point.of, "logged": Point.of_logged}  # by the kind of a row


class CurveSink(ABC):
    """A curve that a thread of its own writes.

    The abstract methods are called on that thread. They may raise anything: the same points are tried again
    later.
    """

    def __init__(self, folder: Path, journal: SqliteDatabase | None = None) -> None:
        """Start the thread.

        Args:
            folder: where the curve, or its local files, and `WRITTEN` are.
            journal: has the points that the process before this one did not write; None: there are none.
        """
        self._folder = folder
        self._journal = journal
        self._until = 0 if journal is None else journal.last
        self._waiting: deque[Point] = deque(maxlen=WAITING)
        self._batch: list[Point] = []
        self._opened = False
        self._problem = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=type(self).__name__, daemon=True)
        self._thread.start()

    def take(self, kind: str, seq: int, row: Mapping[str, Any]) -> None:
        with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):  # curves have no events
            self._waiting.append(POINTS[kind](seq, row))

    def close(self) -> None:
        """Write the waiting points and end the thread; blocks for at most `CLOSE_S`."""
        self._stop.set()
        self._thread.join(CLOSE_S)

    @abstractmethod
    def _open(self, written: Mapping[str, Any]) -> None:
        """Open the curve after the points that ``written``, the content of `WRITTEN`, says it has."""

    @abstractmethod
    def _write(self, points: Sequence[Point]) -> dict[str, Any]:
        """Write points durably; return what `WRITTEN` has to say beside their number."""

    @abstractmethod
    def _shut(self) -> None: ...

    def _run(self) -> None:
        over = False
        while not over:
            over = self._stop.wait(SAVE_S)
            try:
                self._advance()
                self._problem = ""
            except Exception as error:  # a library may raise anything
                if not self._problem:
                    _log.warning("%s: %s: %s", type(self).__name__, type(error).__name__, error)
                self._problem = str(error) or type(error).__name__
                self._opened = False
                self._let_go()
        self._let_go()

    def _advance(self) -> None:
        """Write the waiting points. The library is loaded only when there is one."""
        if not (self._opened or self._waiting or self._until):
            return
        if not self._opened:
            written = self._written()
            self._open(written)
            self._opened = True
            self._catch_up(int(written.get("seq", 0)))
        while self._waiting or self._batch:
            self._batch += [self._waiting.popleft() for _ in range(min(len(self._waiting), READ))]
            self._put(self._batch)
            self._batch = []

    def _catch_up(self, seq: int) -> None:
        """Write the commits of the journal from before this process that the curve does not have."""
        while self._journal is not None and seq < self._until:
            rows = self._journal.read(seq, READ)
            if not rows:
                return
            due = (row for row in rows if row.kind in POINTS and row.seq <= self._until)
            self._put([POINTS[row.kind](row.seq, row.row) for row in due])
            seq = rows[-1].seq
            time.sleep(YIELD_S)

    def _put(self, points: Sequence[Point]) -> None:
        if points:
            note = self._write(points)
            replace_json(self._folder / WRITTEN, {**note, "seq": points[-1].seq})

    def _written(self) -> dict[str, Any]:
        """Return what `WRITTEN` says; a file that says nothing that can be used is set aside."""
        file = self._folder / WRITTEN
        self._folder.mkdir(parents=True, exist_ok=True)
        clear_way(file)
        try:
            written = parsed(read_regular(file))
            figures = [written.get(name, 0) for name in ("seq", "number", "bytes", "step")]
            if all(isinstance(each, int) and 0 <= each < 1 << 53 for each in figures):
                return dict(written)
        except FileNotFoundError:
            return {}
        except (ValueError, AttributeError):
            pass
        _log.warning("%s is damaged and set aside: %s", file, set_aside(file).name)
        return {}

    def _let_go(self) -> None:
        with contextlib.suppress(Exception):
            self._shut()


class TensorBoardSink(CurveSink):
    """Scalars by step in files of TensorBoard. A step that is done again replaces the points from it on."""

    def __init__(self, folder: Path, journal: SqliteDatabase | None = None) -> None:
        self._writer: Any = None
        self._number = 0
        self._step = 0
        super().__init__(folder, journal)

    def _open(self, written: Mapping[str, Any]) -> None:
        with _without_torch():
            from tensorboardX import record_writer
            from tensorboardX.proto import event_pb2, summary_pb2
        self._records, self._events, self._summaries = record_writer, event_pb2, summary_pb2
        self._step, self._number = int(written.get("step", 0)), int(written.get("number", 0))
        if self._file.exists():
            os.truncate(self._file, min(int(written.get("bytes", 0)), self._file.stat().st_size))

    @property
    def _file(self) -> Path:
        return self._folder / f"events.out.tfevents.{self._number:010d}.lighthouse"

    def _write(self, points: Sequence[Point]) -> dict[str, Any]:
        if self._writer is None:
            self._number += 1  # overwrites a file that a dead process began before it noted the number
            self._writer = self._records.RecordWriter(str(self._file))
            self._record(wall_time=points[0].t, file_version="brain.Event:2")
        for point in points:
            if not point.logged and point.step <= self._step:
                start = self._events.SessionLog(status=self._events.SessionLog.START)
                self._record(wall_time=point.t, step=point.step, session_log=start)
            values = [
                self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()
            ]
            self._record(wall_time=point.t, step=point.step, summary=self._summaries.Summary(value=values))
            self._step = self._step if point.logged else point.step
        self._writer.flush()
        return {"number": self._number, "bytes": self._file.stat().st_size, "step": self._step}

    def _record(self, **fields: Any) -> None:
        self._writer.write(self._events.Event(**fields).SerializeToString())

    def _shut(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


class WandbSink(CurveSink):
    def __init__(self, project: str, name: str, folder: Path, journal: SqliteDatabase | None = None) -> None:
        """Start the thread; ``name`` is that of the run, and ``folder`` takes its local files.

        Raises:
            ConfigError: the package wandb is not installed.
        """
        if importlib.util.find_spec("wandb") is None:
            allowed = "null, or first: pip install 'ft_hsdp[wandb]' (the package wandb is not installed)"
            raise ConfigError("lighthouse.wandb", project, allowed)
        self._project = project
        self._name = name
        self._id = ""
        self._run_there: Any = None
        super().__init__(folder, journal)

    def _open(self, written: Mapping[str, Any]) -> None:
        import wandb

        self._id = str(written.get("id") or secrets.token_hex(4))
        self._run_there = wandb.init(
            project=self._project,
            name=self._name,
            id=self._id,
            dir=str(self._folder),
            resume="allow",
            settings=wandb.Settings(console="off", silent=True),
        )

    def _write(self, points: Sequence[Point]) -> dict[str, Any]:
        for point in points:
            if point.logged:  # W&B takes no step below its newest: these have an axis of their own
                for name in point.values:
                    self._run_there.define_metric(name, step_metric=LOGGED_STEP)
                self._run_there.log({**point.values, LOGGED_STEP: point.step})
            else:
                self._run_there.log(point.values, step=point.step)
        return {"id": self._id}

    def _shut(self) -> None:
        there, self._run_there = self._run_there, None
        if there is not None:
            there.finish()


@contextlib.contextmanager
def _without_torch() -> Any:
    """Keep tensorboardX from importing torch, which would cost the lighthouse hundreds of megabytes."""
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["torch"]

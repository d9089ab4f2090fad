"""Sinks: the job's curves for TensorBoard and Weights & Biases, each written by a thread of its own.

A disk that is full or a network that is away costs points of a curve, never a decision: rows are handed over
without waiting. What is inside a curve is noted beside it: a lighthouse that is started again writes no point
twice.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import math
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
from typing import Any, TypeGuard

from ft_hsdp.errors import ConfigError
from lighthouse.journal.database import Database

SAVE_S = 5.0  # between two writes
CLOSE_S = 2.0  # how long the last one may take
WAITING = 20_000  # points that wait for a disk or a network; the oldest make room
READ = 500  # rows of the journal at once
YIELD_S = 0.005  # between two such reads: the lighthouse goes first
WRITTEN = "written.json"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Point:
    """One committed step in figures; ``t`` in Unix seconds, ``seq`` its number in the journal."""

    seq: int
    step: int
    t: float
    values: dict[str, float]

    @staticmethod
    def of(seq: int, row: Mapping[str, Any]) -> Point:
        """The point of a commit row; figures that are missing or not finite are left out."""
        contributors = row.get("contributors")
        healthy = len(contributors) if isinstance(contributors, Sequence) else None
        figures = {
            "loss": row.get("loss"),
            "lr": row.get("lr"),
            "lr_scale": row.get("lr_scale"),
            "step_s": row.get("step_s"),
            "healthy": healthy,
            "gbps": _ratio(row.get("ftar_bytes"), row.get("ftar_s"), 1e-9),
            "tokens_per_s": _ratio(row.get("tokens"), row.get("step_s")),
        }
        values = {name: float(v) for name, v in figures.items() if _is_number(v) and math.isfinite(v)}
        return Point(seq, int(row["step"]), float(row["t"]), values)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _ratio(amount: Any, seconds: Any, unit: float = 1.0) -> float | None:
    """``amount`` per second, in units of 1 / ``unit``; None where it cannot be told."""
    if not (_is_number(amount) and _is_number(seconds)) or not seconds > 0:
        return None
    return float(amount / seconds * unit)


class CurveSink(ABC):
    """A curve in ``folder``. ``journal`` gives the points that the process before this one did not write.

    The abstract methods are called on one thread, and may raise whatever they like: the points are tried again.
    """

    def __init__(self, folder: Path, journal: Database | None = None) -> None:
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

    def event(self, seq: int, row: Mapping[str, Any]) -> None:  # noqa: B027 - a sink takes both
        """Events are in no curve."""

    def commit(self, seq: int, row: Mapping[str, Any]) -> None:
        """Add a committed step; waits for nothing."""
        with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
            self._waiting.append(Point.of(seq, row))

    def close(self) -> None:
        """Write what waits, for at most two seconds."""
        self._stop.set()
        self._thread.join(CLOSE_S)

    @abstractmethod
    def _open(self, written: Mapping[str, Any]) -> None:
        """Get ready to write after what ``written`` says is inside."""

    @abstractmethod
    def _write(self, points: Sequence[Point]) -> dict[str, Any]:
        """Write points so that they stay; what to note beside their number."""

    @abstractmethod
    def _shut(self) -> None:
        """Let go of what `_open` made, in whatever state it is."""

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
        """Write all that waits; the library is loaded when there is something to write."""
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
        """Write the commits that were there when this process began, and are not inside."""
        while self._journal is not None and seq < self._until:
            rows = self._journal.read(seq, READ)
            if not rows:
                return
            self._put([Point.of(e.seq, e.row) for e in rows if e.kind == "commit" and e.seq <= self._until])
            seq = rows[-1].seq
            time.sleep(YIELD_S)

    def _put(self, points: Sequence[Point]) -> None:
        if points:
            note = self._write(points)
            part = self._folder / f".{WRITTEN}.part"
            part.write_text(json.dumps({**note, "seq": points[-1].seq}))
            part.replace(self._folder / WRITTEN)

    def _written(self) -> dict[str, Any]:
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            written = json.loads((self._folder / WRITTEN).read_text())
        except (FileNotFoundError, ValueError):
            return {}
        return written if isinstance(written, dict) else {}

    def _let_go(self) -> None:
        with contextlib.suppress(Exception):
            self._shut()


class TensorBoardSink(CurveSink):
    """Scalars by step in files of TensorBoard; a step that is done again replaces those from it on."""

    def __init__(self, folder: Path, journal: Database | None = None) -> None:
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
            self._number += 1  # a file that a dead process began, and did not note, is written anew
            self._writer = self._records.RecordWriter(str(self._file))
            self._record(wall_time=points[0].t, file_version="brain.Event:2")
        for point in points:
            if point.step <= self._step:
                start = self._events.SessionLog(status=self._events.SessionLog.START)
                self._record(wall_time=point.t, step=point.step, session_log=start)
            values = [
                self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()
            ]
            self._record(wall_time=point.t, step=point.step, summary=self._summaries.Summary(value=values))
            self._step = point.step
        self._writer.flush()
        return {"number": self._number, "bytes": self._file.stat().st_size, "step": self._step}

    def _record(self, **fields: Any) -> None:
        self._writer.write(self._events.Event(**fields).SerializeToString())

    def _shut(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


class WandbSink(CurveSink):
    """A run called ``name`` of a project at Weights & Biases; ``folder`` takes its local files.

    Raises ConfigError, if the package wandb is not installed.
    """

    def __init__(self, project: str, name: str, folder: Path, journal: Database | None = None) -> None:
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
            self._run_there.log(point.values, step=point.step)
        return {"id": self._id}

    def _shut(self) -> None:
        there, self._run_there = self._run_there, None
        if there is not None:
            there.finish()


@contextlib.contextmanager
def _without_torch() -> Any:
    """tensorboardX imports torch where it is installed: hundreds of megabytes that nobody here wants."""
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["torch"]

import errno
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import RecordWriter, masked_crc32c

from ft_hsdp.errors import ConfigError
from lighthouse.journal import exporters
from lighthouse.journal.database import MemoryDatabase
from lighthouse.journal.exporters import CurveSink, Point, TensorBoardSink, WandbSink
from lighthouse.overview.overview import JournalEntry
from tests.support.launch.launch_rows import commit
from tests.support.waiting import until

TAGS = ("loss", "lr", "lr_scale", "step_s", "healthy", "units", "units_wanted", "gbps", "tokens_per_s")


def row(step: int, **other: Any) -> dict[str, Any]:
    figures = {"loss": 4.0 / step, "lr": 0.25, "lr_scale": 0.5, "step_s": 2.0, "units": 12, "units_wanted": 16}
    moved = {"ftar_bytes": 3_000_000_000, "ftar_s": 1.5, "tokens": 512}
    return {**commit(step, who=(0, 2)), **figures, **moved, **other}


def records(file: Path) -> Iterator[Any]:
    """The events of a file of TensorBoard; every checksum holds."""
    data = file.read_bytes()
    while data:
        head, (length,) = data[:8], struct.unpack("<Q", data[:8])
        body = data[12 : 12 + length]
        assert struct.unpack("<II", data[8:12] + data[12 + length : 16 + length]) == (
            masked_crc32c(head),
            masked_crc32c(body),
        )
        yield Event.FromString(body)
        data = data[16 + length :]


def events(folder: Path) -> list[Any]:
    return [event for file in sorted(folder.glob("*tfevents*")) for event in records(file)]


def steps(folder: Path) -> list[int]:
    return [event.step for event in events(folder) if event.HasField("summary")]


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(exporters, "SAVE_S", 0.02)


def test_a_step_is_a_point_in_each_curve(tmp_path: Path) -> None:
    taken(tmp_path, ("event", {"event": "EpochGranted"}), ("commit", row(1)))
    (event,) = [e for e in events(tmp_path) if e.HasField("summary")]
    assert {v.tag: v.simple_value for v in event.summary.value} == dict(
        zip(TAGS, (4.0, 0.25, 0.5, 2.0, 2.0, 12.0, 16.0, 2.0, 256.0), strict=True)
    )
    assert (event.step, event.wall_time) == (1, 1001.0)
    assert events(tmp_path)[0].file_version == "brain.Event:2"


@pytest.mark.parametrize(
    ("odd", "missing"),
    [
        ({"loss": float("nan")}, {"loss"}),
        ({"loss": None, "lr": "0.1"}, {"loss", "lr"}),
        ({"ftar_s": 0.0, "step_s": 0}, {"gbps", "tokens_per_s"}),
        ({"contributors": None, "tokens": True}, {"healthy", "tokens_per_s"}),
        ({"units": None, "units_wanted": None}, {"units", "units_wanted"}),
    ],
)
def test_what_is_no_figure_is_left_out(odd: dict[str, Any], missing: set[str]) -> None:
    assert set(TAGS) - set(Point.of(1, row(1, **odd)).values) == missing


def test_a_row_without_a_step_is_no_point(tmp_path: Path) -> None:
    bad: list[dict[str, Any]] = [{}, {"step": "x", "t": 1}, {"step": 1}, {"step": 1, "t": None}]
    taken(tmp_path, *(("commit", each) for each in [*bad, row(1)]))
    assert steps(tmp_path) == [1]


def test_a_step_that_is_done_again_begins_the_curve_anew_from_there(tmp_path: Path) -> None:
    taken(tmp_path, *(("commit", row(step)) for step in (1, 2, 3, 2, 3)))
    found = [(e.step, e.session_log.status if e.HasField("session_log") else None) for e in events(tmp_path)]
    assert found == [(0, None), (1, None), (2, None), (3, None), (2, SessionLog.START), (2, None), (3, None)]


def taken(folder: Path, *rows: tuple[str, dict[str, Any]], database: MemoryDatabase | None = None) -> None:
    """What a sink is given, numbered from 1, until it is closed."""
    sink = TensorBoardSink(folder, database)
    for seq, (kind, what) in enumerate(rows, 1):
        sink.take(kind, seq, what)
    sink.close()


def journal(count: int) -> MemoryDatabase:
    """An database of ``count`` steps, with an event before each."""
    database = MemoryDatabase()
    for step in range(1, count + 1):
        note = {"t": 1.0, "event": "EpochGranted"}
        database.append([JournalEntry(2 * step - 1, "event", note), JournalEntry(2 * step, "commit", row(step))])
    return database


def test_the_next_process_goes_on_where_the_last_one_was_killed(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path, journal(3))
    until(lambda: (tmp_path / exporters.WRITTEN).exists(), "the curve is written")
    sink.close()
    (noted,) = tmp_path.glob("*tfevents*")
    whole = noted.read_bytes()
    noted.write_bytes(whole + whole[:77])  # written and not noted when it was killed: the same file, a new one
    (tmp_path / "events.out.tfevents.0000000002.lighthouse").write_bytes(whole)
    database = journal(5)
    sink = TensorBoardSink(tmp_path, database)
    database.append([JournalEntry(11, "commit", row(6))])
    sink.take("commit", 11, row(6))
    sink.close()
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]
    taken(tmp_path, database=database)
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]


def test_a_journal_that_lost_its_end_is_not_written_again(tmp_path: Path) -> None:
    TensorBoardSink(tmp_path, journal(5)).close()
    sink = TensorBoardSink(tmp_path, journal(2))
    sink.take("commit", 5, row(6))
    sink.close()
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]


def test_the_lighthouse_gets_no_torch_by_it(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from lighthouse.journal.exporters import TensorBoardSink as T\n"
        "assert 'tensorboardX' not in sys.modules\n"
        f"s = T(Path({str(tmp_path)!r})); s.take('commit', 1, {row(1)!r}); s.close()\n"
        "assert 'tensorboardX' in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert steps(tmp_path) == [1]


def test_a_full_disk_costs_nothing_that_fits_in_memory(tmp_path: Path, monkeypatch, caplog) -> None:
    full = threading.Event()
    full.set()
    flush = RecordWriter.flush

    def flushed(writer: RecordWriter) -> None:
        flush(writer)
        if full.is_set():  # the worst moment: all is in the file, and nothing is noted
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(RecordWriter, "flush", flushed)
    sink = TensorBoardSink(tmp_path)
    for step in range(1, 20):
        sink.take("commit", step, row(step))
    until(lambda: "No space left" in caplog.text, "somebody hears of it")
    sink.take("commit", 20, row(20))
    full.clear()
    until(lambda: (tmp_path / exporters.WRITTEN).exists(), "the disk has room again")
    sink.close()
    assert steps(tmp_path) == list(range(1, 21))
    assert len(caplog.records) == 1


def test_a_folder_that_cannot_be_made_is_no_failure(tmp_path: Path, caplog) -> None:
    (tmp_path / "file").write_text("")
    sink = TensorBoardSink(tmp_path / "file" / "curves")
    sink.take("commit", 1, row(1))
    until(lambda: "TensorBoardSink" in caplog.text, "somebody hears of it")
    sink.close()


class Stuck(CurveSink):
    """Somebody who takes no point before the end."""

    def __init__(self, folder: Path) -> None:
        self.begun, self.over, self.shut = threading.Event(), threading.Event(), threading.Event()
        self.taken = 0
        super().__init__(folder)

    def _open(self, written: Mapping[str, Any]) -> None:
        pass

    def _write(self, points: Sequence[Point]) -> dict[str, Any]:
        self.begun.set()
        self.over.wait()
        self.taken += len(points)
        return {}

    def _shut(self) -> None:
        self.shut.set()


def test_who_never_takes_a_point_holds_nobody_up_and_gets_no_more_than_its_place(tmp_path: Path) -> None:
    sink = Stuck(tmp_path)
    one = row(1)
    sink.take("commit", 0, one)
    assert sink.begun.wait(30)
    for seq in range(1, 50_000):  # the sink is stuck for good: a commit that waited for it would never return
        sink.take("commit", seq, one)
    sink.close()
    sink.over.set()
    assert sink.shut.wait(30)
    assert sink.taken <= 1 + exporters.WAITING


def test_weights_and_biases_without_its_package_is_one_clear_line(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"^lighthouse\.wandb: got 'p'; allowed: null, or .*not installed"):
        WandbSink("p", "n", tmp_path)


def test_weights_and_biases_offline(tmp_path: Path, monkeypatch) -> None:
    """Needs the package; nothing is sent."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(exporters, "CLOSE_S", 60)
    sink = WandbSink("ft-hsdp-test", "run", tmp_path)
    for step in (1, 2, 3):
        sink.take("commit", step, row(step))
    sink.close()
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")

    def fewest() -> int:
        text = file.read_bytes()
        return min(text.count(tag.encode()) for tag in TAGS)

    until(lambda: fewest() >= 3, "a process of the package writes the points", 60.0)
    assert '"seq": 3' in (tmp_path / exporters.WRITTEN).read_text()


def values(step: int, **named: float) -> dict[str, Any]:
    return {"t": 1000.0 + step, "step": step, "epoch": 1, "values": named}


def test_logged_values_are_points_of_their_own_and_do_not_begin_the_curve_anew(tmp_path: Path) -> None:
    database = MemoryDatabase()
    database.append([JournalEntry(1, "commit", row(1)), JournalEntry(2, "logged", values(1, accuracy=0.5))])
    sink = TensorBoardSink(tmp_path, database)
    sink.take("commit", 3, row(2))
    sink.take("logged", 4, values(1, late=1.0))
    sink.take("logged", 5, {"step": 1})
    sink.take("commit", 6, row(3))
    sink.close()
    found = [(e.step, [v.tag for v in e.summary.value]) for e in events(tmp_path) if e.HasField("summary")]
    assert [(step, tags if len(tags) == 1 else []) for step, tags in found] == [
        (1, []),
        (1, ["accuracy"]),
        (2, []),
        (1, ["late"]),
        (3, []),
    ]
    assert not any(event.HasField("session_log") for event in events(tmp_path))


def test_logged_values_have_an_axis_of_their_own_at_weights_and_biases(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "wandb.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    told: list[Any] = []

    class Run:
        def define_metric(self, name: str, step_metric: str) -> None:
            told.append((name, step_metric))

        def log(self, values: dict[str, float], step: int | None = None) -> None:
            told.append((values, step) if step is None else step)

        def finish(self) -> None:
            pass

    class Sink(WandbSink):
        def _open(self, written: Mapping[str, Any]) -> None:
            self._run_there = Run()

    sink = Sink("p", "n", tmp_path)
    sink.take("commit", 1, row(7))
    sink.take("logged", 2, values(5, accuracy=0.5))
    sink.close()
    assert told == [7, ("accuracy", "logged_step"), ({"accuracy": 0.5, "logged_step": 5}, None)]

"""Logs on disks that are full, that fail, that write half a line, that hang: lines are lost, counted and told."""

import errno
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from ft_hsdp import jsonl
from ft_hsdp.config import parse
from ft_hsdp.core.state_id import StateId
from ft_hsdp.jsonl import WAIT_S, DiskThread, Journal, LineWriter, Lost, Queued, replace_json, reserve, strict
from ft_hsdp.launch.run.directory import RunDir, Tailer, open_log, read_json, read_jsonl, try_write_json
from ft_hsdp.launch.run.recorder import Recorder
from ft_hsdp.train.step_log import StepLog
from tests.support.launch.launch_rows import commit

Answer = int | OSError | Callable[[int, bytes], int]


class Disk:
    """What `os.write` of these files does: whatever the next of ``answers`` says; a number is a short write."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: Answer) -> None:
        self._real, self.answers = os.write, list(answers)
        monkeypatch.setattr(jsonl.os, "write", self._write)

    def _write(self, descriptor: int, data: bytes) -> int:
        if not self.answers:
            return self._real(descriptor, data)
        answer = self.answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        if callable(answer):
            return answer(descriptor, data)
        return self._real(descriptor, data[:answer])


def full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_lines_that_a_disk_does_not_take_are_counted_and_told_when_it_does(tmp_path, monkeypatch, code) -> None:
    told: list[Lost] = []
    lines = LineWriter(tmp_path / "log.jsonl", told.append)
    Disk(monkeypatch, *(OSError(code, os.strerror(code)) for _ in range(2)))
    assert [lines.write({"n": n}) for n in range(4)] == [False, False, True, True]
    lines.close()
    assert read_jsonl(tmp_path / "log.jsonl") == [{"n": 2}, {"n": 3}]
    (lost,) = told
    assert (lost.file, lost.lines, lost.why) == ("log.jsonl", 2, os.strerror(code))
    assert lost.since <= lost.until
    assert lost.event["event"] == "LogLinesLost"


@pytest.mark.parametrize("piece", [1, 2, 3, 5, 14, 15, 20])
def test_a_short_write_tears_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    """A line that is cut is written again; where the disk is full for that too, it is lost, the next is whole."""
    path, told = tmp_path / "log.jsonl", []
    lines, tailer = LineWriter(path, told.append), Tailer(path)
    lines.write({"n": 0, "text": "x" * 20})
    Disk(monkeypatch, piece)
    assert lines.write({"n": 1, "text": "x" * 20})
    Disk(monkeypatch, piece, full())
    assert not lines.write({"n": 2, "text": "x" * 20})
    found = tailer.poll()
    assert lines.write({"n": 3, "text": "x" * 20})
    assert [row["n"] for row in found + tailer.poll()] == [0, 1, 3]
    for line in path.read_text().splitlines():
        assert not line.strip() or isinstance(json.loads(line), dict), "each line is strict JSON by itself"
    assert [lost.lines for lost in told] == [1]


def test_a_piece_that_another_process_wrote_behind_harms_neither(tmp_path, monkeypatch) -> None:
    path = tmp_path / "log.jsonl"
    mine, other, real = LineWriter(path), LineWriter(path), os.write

    def cut(descriptor: int, data: bytes) -> int:
        done = real(descriptor, data[:20])
        other.write({"who": "other"})
        return done

    Disk(monkeypatch, cut)
    assert mine.write({"who": "mine", "text": "x" * 40})
    assert [row["who"] for row in read_jsonl(path)] == ["other", "mine"]


def test_a_piece_that_cannot_be_mended_costs_no_other_line(tmp_path, monkeypatch) -> None:
    path = tmp_path / "log.jsonl"
    lines = LineWriter(path)
    with monkeypatch.context() as broken:
        broken.setattr(jsonl.os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
        Disk(broken, 9, full())
        assert not lines.write({"n": 1, "text": "x" * 20})
    assert lines.write({"n": 2})
    tailer = Tailer(path)
    assert (tailer.poll(), tailer.bad) == ([{"n": 2}], 1)


def test_a_disk_that_hangs_holds_up_no_control_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writing thread hangs, callers go on; what finds no place is counted, and told when the disk answers."""
    answers, told, real = threading.Event(), [], os.write

    def hangs(descriptor: int, data: bytes) -> int:
        answers.wait(60)
        return real(descriptor, data)

    Disk(monkeypatch, hangs)
    log, last = Queued(tmp_path / "log.jsonl", told.append), jsonl.QUEUE + 10
    for n in range(last):
        log.write({"n": n})  # a caller that waited for the disk would wait for ever
    answers.set()
    assert log.flush(60)
    log.write({"n": last})
    log.close()
    kept = [row["n"] for row in read_jsonl(tmp_path / "log.jsonl")]
    assert (kept[0], kept[-1]) == (0, last)
    assert sum(lost.lines for lost in told) == last + 1 - len(kept) > 0


def test_a_disk_that_was_late_once_is_waited_for_again(tmp_path, monkeypatch) -> None:
    """The line that a rank writes before it ends is in its log when the call returns."""
    real = os.write

    def after(pause_s: float) -> Answer:
        return lambda descriptor, data: time.sleep(pause_s) or real(descriptor, data)

    Disk(monkeypatch, after(0.4), after(0.05), after(0.05))
    log = Queued(tmp_path / "log.jsonl")
    log.write({"n": 0})
    assert log.flush()
    for n in (1, 2):
        log.write({"n": n})
        assert [row["n"] for row in read_jsonl(tmp_path / "log.jsonl")] == list(range(n + 1))
    log.close()


def test_a_journal_without_a_disk_still_tells_who_listens(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    heard: list[object] = []
    journal = Journal(tmp_path / "file" / "events.jsonl", lambda row: heard.append(row["event"]), replica=1)
    journal.event("RingBroken", "it broke")
    journal.close()
    assert heard == ["RingBroken", "LogLinesLost"]


def test_figures_that_are_not_finite_are_null_and_say_so() -> None:
    row = {"loss": float("nan"), "waits": {"ring": float("inf")}, "all": [1.0, float("-inf")]}
    assert json.loads(strict(row), parse_constant=lambda name: pytest.fail(name)) == {
        "loss": None,
        "waits": {"ring": None},
        "all": [1.0, None],
        "finite": False,
    }
    assert strict({"loss": 1.5}) == '{"loss":1.5}'


def test_a_file_is_replaced_on_a_full_disk_in_its_own_blocks(tmp_path, monkeypatch) -> None:
    path = tmp_path / "a.json"
    replace_json(path, {"pid": 1, "more": "x" * 10})
    Disk(monkeypatch, full())  # the file beside it finds no place
    replace_json(path, {"pid": 2})
    assert read_json(path) == {"pid": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
    Disk(monkeypatch, full())
    with pytest.raises(OSError, match="No space"):
        replace_json(tmp_path / "new.json", {"pid": 2})


def test_a_full_disk_costs_the_files_of_a_supervisor_and_of_a_leader_and_nobody_s_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file can be made or written: pictures of processes, outputs, the final state, the summary."""
    told: list[Lost] = []
    log = StepLog(tmp_path / "replicas/0", "0-x-0", lost=told.append)
    recorder = Recorder(RunDir(tmp_path), parse({}), lambda row: None, lambda row: None)
    full_disk = mock.Mock(side_effect=full())
    monkeypatch.setattr(jsonl.os, "write", full_disk)
    monkeypatch.setattr(jsonl, "_overwrite", full_disk)
    monkeypatch.setattr(Path, "open", full_disk)
    try_write_json(tmp_path / "processes.json", {"pid": 1})
    with open_log(tmp_path / "rank0.log") as nowhere:
        nowhere.write(b"lost")
    log.final(StateId(1, 2, "ab" * 16), "cd" * 16, "ef" * 16, built_in=True, of_job=True)
    assert recorder.finish()["steps"] == 0
    log.close()
    recorder.close()
    assert [lost.file for lost in told] == ["final.json"]
    assert full_disk.call_count >= 4


def test_the_summary_is_written_after_the_lines_of_the_other_merged_files(tmp_path, monkeypatch) -> None:
    """A reader who has waited for summary.json finds metrics.jsonl whole, though its disk is slow."""
    run = RunDir(tmp_path)
    recorder = Recorder(run, parse({"replicas": 1}), lambda row: None, lambda row: None)
    late = threading.Event()
    append = jsonl.LineWriter.append

    def slow(file: jsonl.LineWriter, line: bytes) -> bool:
        if file.path == run.metrics:
            assert late.wait(30)
        return append(file, line)

    found: list[int] = []

    def summary(path: Path, value: object) -> None:
        found.extend(row["step"] for row in read_jsonl(run.metrics))

    monkeypatch.setattr(jsonl.LineWriter, "append", slow)
    monkeypatch.setattr("ft_hsdp.launch.run.recorder.replace_json", summary)
    run.commits(0).parent.mkdir(parents=True)
    run.commits(0).write_text("".join(f"{json.dumps(commit(step, who=(0,)))}\n" for step in (1, 2, 3)))
    thread = threading.Thread(target=recorder.finish)
    thread.start()
    thread.join(3 * WAIT_S)  # it waits for a line no longer than WAIT_S
    late.set()
    thread.join()
    recorder.close()
    assert found == [1, 2, 3]


def test_what_was_reserved_is_used(tmp_path: Path) -> None:
    (tmp_path / ".final.json.1.part").write_text("left by a life before")
    reserve(tmp_path / "final.json")
    (part,) = tmp_path.iterdir()
    place = part.stat().st_ino
    replace_json(tmp_path / "final.json", {"step": 1})
    assert (tmp_path / "final.json").stat().st_ino == place
    assert (tmp_path / "final.json").read_text() == '{"step": 1}\n'


def test_a_write_that_hangs_is_done_later_and_none_waits_behind_it():
    disk, answers, done = DiskThread(0.05), threading.Event(), []
    for write in (lambda: done.append(answers.wait(30)), lambda: done.append("behind it")):
        with pytest.raises(TimeoutError):
            disk.run(write)
    assert disk.busy
    answers.set()
    assert disk.close()
    assert done == [True]


def test_a_fork_writes_its_lines_itself(tmp_path: Path) -> None:
    """The lock of the thread that writes may be held at the fork, and nobody would let it go."""
    file = tmp_path / "lines"
    lines = Queued(file)
    lines.append(b"1\n")
    with lines._changed:
        child = os.fork()
        if child == 0:
            lines.append(b"2\n")
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    lines.close()
    assert file.read_bytes() == b"1\n2\n"

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp.errors import ConfigError
from ft_hsdp.jsonl import LineWriter
from ft_hsdp.launch.run.directory import (
    RunDir,
    Tailer,
    alive,
    claim,
    identity,
    newest_live,
    read_json,
    read_jsonl,
    write_json,
)


def test_a_line_that_is_not_whole_waits_for_its_end(tmp_path: Path) -> None:
    log, tailer = tmp_path / "log", Tailer(tmp_path / "log")
    assert tailer.poll() == []
    log.write_text('{"a": 1}\n{"b": ')
    assert tailer.poll() == [{"a": 1}]
    with log.open("a") as file:
        file.write("2}\n\n")
    assert tailer.poll() == [{"b": 2}]
    assert tailer.poll() == []
    assert tailer.bad == 0


def test_the_line_of_a_killed_writer_is_counted_and_passed_over(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b'{"a": 1}\n{"half": {"a": 2}\n[3]\n\xff\n{"a": 4}\n')
    tailer = Tailer(tmp_path / "log")
    assert tailer.poll() == [{"a": 1}, {"a": 4}]
    assert tailer.bad == 3


def test_one_look_at_a_long_log_takes_a_piece_of_it(tmp_path: Path) -> None:
    """The log of a month is not read in one piece, on the loop that carries out evictions."""
    rows = [{"n": n, "text": "x" * 80} for n in range(1000)]
    (tmp_path / "log").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    whole, pieces = Tailer(tmp_path / "log"), []
    while piece := whole.poll(2000):
        pieces.append(piece)
    assert [row for piece in pieces for row in piece] == rows
    assert max(map(len, pieces)) <= 2000 // 80
    newest = Tailer(tmp_path / "log").newest(2000)
    assert newest == rows[-len(newest) :]
    assert 0 < len(newest) <= 2000 // 80
    assert Tailer(tmp_path / "log").poll(10) == rows[:1], "a line that is longer comes as a whole"


@given(cuts=st.lists(st.integers(0, 200), max_size=8))
def test_any_cut_of_a_log_reads_the_same(tmp_path_factory: pytest.TempPathFactory, cuts: list[int]) -> None:
    log = tmp_path_factory.mktemp("cut") / "log"
    rows = [{"n": n, "text": "ä" * n} for n in range(8)]
    appender = LineWriter(log)
    for row in rows:
        appender.write(row)
    appender.close()
    data = log.read_bytes()
    log.write_bytes(b"")
    tailer, found, start = Tailer(log), [], 0
    for cut in [*sorted(min(cut, len(data)) for cut in cuts), len(data)]:
        with log.open("ab") as file:
            file.write(data[start:cut])
        found += tailer.poll()
        start = cut
    assert found == rows == read_jsonl(log)


def test_json_is_replaced_whole_and_what_is_no_json_reads_as_none(tmp_path: Path) -> None:
    write_json(tmp_path / "new" / "a.json", {"a": 1})
    write_json(tmp_path / "new" / "a.json", {"a": 2})
    assert read_json(tmp_path / "new" / "a.json") == {"a": 2}
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["a.json"]
    (tmp_path / "bad").write_text("{")
    assert read_json(tmp_path / "bad") is None
    assert read_json(tmp_path / "none") is None


def test_a_process_is_known_by_pid_and_time_of_birth() -> None:
    me = identity()
    assert alive(me)
    assert alive({"pid": os.getpid()})
    assert not alive({**me, "created": me["created"] - 60})
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not alive({"pid": child.pid}), "a zombie"
    for nothing in (None, {}, {"pid": 0}, {"pid": "1"}, {"pid": 2**40}, {"pid": -1}):
        assert not alive(nothing)


def test_an_old_run_is_moved_away_under_the_time_of_its_start(run_dir: RunDir) -> None:
    write_json(run_dir.supervisor, {"pid": 2**22 + 1})
    os.utime(run_dir.supervisor, (0, 0))
    claim(run_dir)
    assert list(run_dir.path.iterdir()) == []
    assert (run_dir.path.parent / "job.19700101T000000Z" / "config.yaml").exists()
    write_json(run_dir.supervisor, {"pid": 2**22 + 1})
    os.utime(run_dir.supervisor, (0, 0))
    claim(run_dir)
    assert (run_dir.path.parent / "job.19700101T000000Z-2").is_dir()


@pytest.mark.parametrize("file", ["supervisor", "lighthouse"])
def test_the_name_of_a_running_job_is_refused(run_dir: RunDir, file: str) -> None:
    write_json(getattr(run_dir, file), identity(os.getppid()))
    with pytest.raises(ConfigError, match=rf"job.name: got 'job'.*pid {os.getppid()}"):
        claim(run_dir)
    assert run_dir.config.exists()


def test_the_pid_of_this_process_is_that_of_one_before_it(run_dir: RunDir) -> None:
    """In a container that was started again the new process has the pid of the old one."""
    write_json(run_dir.lighthouse, {"pid": os.getpid()})
    claim(run_dir)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"job\.runs_dir"):
        claim(RunDir(tmp_path / "file" / "job"))


def test_the_newest_run_that_lives_is_found(tmp_path: Path) -> None:
    assert newest_live(tmp_path) is None
    for n, (name, named) in enumerate({"a": identity(), "b": identity(), "c": {"pid": 2**22 + 1}}.items()):
        file = RunDir(tmp_path / name).supervisor
        write_json(file, named)
        os.utime(file, (n, n))
    newest = newest_live(tmp_path)
    assert newest is not None
    assert newest.path == tmp_path / "b"


def test_a_job_of_another_host_is_not_moved_aside_while_its_files_change(tmp_path: Path) -> None:
    """Its pid says nothing here: the folder of runs is shared, the processes are not."""
    run = RunDir(tmp_path / "job")
    for file in (run.supervisor, run.lighthouse):
        run.path.mkdir()
        write_json(file, {**identity(), "pid": 1 << 22, "host": "elsewhere", "boot": "another"})
        run.metrics.write_text("{}\n")
        with pytest.raises(ConfigError, match=r"job\.name.*pid 4194304 on elsewhere; its files changed 0 s ago"):
            claim(run)
        for each in (file, run.metrics):
            os.utime(each, (0, time.time() - 1000))
        claim(run)
        assert not list(run.path.iterdir())
        run.path.rmdir()
    run.path.mkdir()
    write_json(run.supervisor, {**identity(), "host": "elsewhere"})
    write_json(run.summary, {})
    claim(run)  # it says itself that it has ended


def test_who_ran_before_the_host_was_started_again_runs_no_more() -> None:
    assert not alive({**identity(), "boot": "the one before"})

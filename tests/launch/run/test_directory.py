import asyncio
import json
import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp.claim import Claim, FolderOwner
from ft_hsdp.config import Config, load, parse
from ft_hsdp.errors import ConfigError
from ft_hsdp.jsonl import LineWriter, read_object, replace_json
from ft_hsdp.launch.run.directory import (
    JobFiles,
    RunDir,
    Tailer,
    alive,
    make_run,
    newest_live,
    open_log,
    read_json,
    read_jsonl,
    write_config,
    write_job_files,
)
from ft_hsdp.lifetime import identity
from tests.support.waiting import async_until


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


def test_nothing_odd_in_the_place_of_a_file_holds_up_who_reads_or_writes_it(tmp_path: Path) -> None:
    for make in (os.mkfifo, os.mkdir):
        make(tmp_path / "file")
        assert (read_json(tmp_path / "file"), read_jsonl(tmp_path / "file")) == (None, [])
        with open_log(tmp_path / "file") as log:
            log.write(b'{"a": 1}\n')
        assert read_json(tmp_path / "file") == {"a": 1}
        (tmp_path / "file").unlink()
    (tmp_path / "file").write_text("[" * 100_000 + '\n{"a": 1}\n')
    assert read_jsonl(tmp_path / "file") == [{"a": 1}]
    assert (read_json(tmp_path / "file"), read_object(tmp_path / "file")) == (None, {})


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


def test_a_configuration_is_utf_8_in_any_locale(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from ft_hsdp.config import parse\n"
        "from ft_hsdp.launch.run.directory import RunDir, write_job_files\n"
        "for name, alerts in {'a': [], 'b': [{'url': 'https://x.example'}]}.items():\n"
        "    config = parse({'entry': 'train.py', 'args': ['f\\xfcr'], 'alerts': alerts})\n"
        "    write_job_files(RunDir(Path(sys.argv[1], name)), config)\n"
    )
    ascii_alone = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=ascii_alone, check=True, timeout=60)
    assert [load(RunDir(tmp_path / name).config).args for name in "ab"] == [("für",)] * 2


def test_json_is_replaced_whole_and_what_is_no_json_reads_as_none(tmp_path: Path) -> None:
    replace_json(tmp_path / "new" / "a.json", {"a": 1})
    replace_json(tmp_path / "new" / "a.json", {"a": 2})
    assert read_json(tmp_path / "new" / "a.json") == {"a": 2}
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["a.json"]
    (tmp_path / "bad").write_text("{")
    assert read_json(tmp_path / "bad") is None
    assert read_json(tmp_path / "none") is None


def test_a_process_is_known_by_pid_and_time_of_birth(tmp_path: Path) -> None:
    me = identity()
    assert alive(me)
    assert alive({"pid": os.getpid()})
    assert not alive({**me, "start_ticks": me["start_ticks"] - 1})
    assert not alive({**me, "boot": "an earlier one"})
    (tmp_path / "stat").write_text("btime 1\n")
    (tmp_path / str(me["pid"])).symlink_to(f"/proc/{me['pid']}")
    with mock.patch("psutil.PROCFS_PATH", str(tmp_path)):  # as if the clock of the host had been set
        assert (alive(me), identity()) == (True, me)
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not alive({"pid": child.pid}), "a zombie"
    for nothing in (None, {}, {"pid": 0}, {"pid": "1"}, {"pid": 2**40}, {"pid": -1}):
        assert not alive(nothing)


def test_an_old_run_is_moved_away_under_the_time_of_its_start(run_dir: RunDir) -> None:
    replace_json(run_dir.supervisor, {"pid": 2**22 + 1})
    os.utime(run_dir.supervisor, (0, 0))
    make_run(run_dir, Config()).release()
    assert read_json(run_dir.supervisor) is None
    assert (run_dir.path.parent / "job.19700101T000000Z" / "config.yaml").exists()
    replace_json(run_dir.supervisor, {"pid": 2**22 + 1})
    os.utime(run_dir.supervisor, (0, 0))
    make_run(run_dir, Config(), said={"pid": 1}).release()
    assert read_json(run_dir.supervisor) == {"pid": 1}
    assert sorted(p.name for p in run_dir.path.parent.glob(".job*")) == [], "nothing is left beside"
    assert (run_dir.path.parent / "job.19700101T000000Z-2").is_dir()


@pytest.mark.parametrize("file", ["supervisor", "lighthouse"])
def test_the_name_of_a_running_job_is_refused(run_dir: RunDir, file: str) -> None:
    replace_json(getattr(run_dir, file), identity(os.getppid()))
    with pytest.raises(ConfigError, match=rf"job.name: got 'job'.*pid {os.getppid()}"):
        make_run(run_dir, Config())
    assert run_dir.config.exists()
    assert not list(run_dir.path.parent.glob(".job*"))


def test_the_pid_of_this_process_is_that_of_one_before_it(run_dir: RunDir) -> None:
    """In a container that was started again the new process has the pid of the old one."""
    replace_json(run_dir.lighthouse, {"pid": os.getpid()})
    make_run(run_dir, Config()).release()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"job\.runs_dir"):
        make_run(RunDir(tmp_path / "file" / "job"), Config())


def test_the_newest_run_that_lives_is_found(tmp_path: Path) -> None:
    assert newest_live(tmp_path) is None
    for n, (name, named) in enumerate({"a": identity(), "b": identity(), "c": {"pid": 2**22 + 1}}.items()):
        file = RunDir(tmp_path / name).supervisor
        replace_json(file, named)
        os.utime(file, (n, n))
    for name, more in {"d": {"url": "http://node7:1"}, "e": {}}.items():
        replace_json(RunDir(tmp_path / name).lighthouse, {**identity(), "host": "node7", "boot": "its", **more})
    for found, left in {"b": "ab", "d": ""}.items():  # one of this machine first, then one that can be asked
        newest = newest_live(tmp_path)
        assert newest is not None
        assert newest.path == tmp_path / found
        for name in left:
            RunDir(tmp_path / name).supervisor.unlink()


def test_of_two_that_make_one_run_at_a_time_one_has_it(tmp_path: Path) -> None:
    """Processes of one job share it; another job is refused, and the run stays as it is."""
    run = RunDir(tmp_path / "job")
    with ThreadPoolExecutor(8) as pool:
        claims = list(pool.map(lambda _: make_run(run, Config(), "a" * 64), range(8)))
    assert run.token.read_text() == "a" * 64
    assert {p.name for p in tmp_path.iterdir()} == {"job"}
    before = run.config.stat().st_ino
    with pytest.raises(
        ConfigError, match=r"job\.name: .*a name that no running job has \(job job has it since 20"
    ):
        make_run(run, Config())
    assert run.config.stat().st_ino == before
    assert {p.name for p in tmp_path.iterdir()} == {"job"}
    for claim in claims:
        claim.release()
    make_run(run, Config()).release()
    assert len(list(tmp_path.glob("job.*Z"))) == 1


def test_of_several_jobs_that_make_one_run_at_a_time_one_has_it(run_dir: RunDir) -> None:
    """An ended run stands there: each of them finds that no job runs, and it is moved aside once."""

    def make(number: int) -> str:
        try:
            claims.append(make_run(run_dir, Config(), f"{number}" * 64))
        except ConfigError as refused:
            return refused.key
        return f"{number}"

    claims: list[Claim] = []
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(make, range(8)))
    (winner,) = set(found) - {"job.name"}
    assert found.count("job.name") == 7
    assert run_dir.token.read_text() == winner * 64
    assert len(list(run_dir.path.parent.glob("job.*Z"))) == 1, "the ended run alone was moved aside"
    claims[0].release()


@pytest.mark.parametrize(
    "secrets",
    [{"alerts": [{"url": "https://a/secret"}]}, {"ray": {"runtime_env": {"env_vars": {"KEY": "secret"}}}}],
)
def test_a_configuration_with_secrets_is_for_its_owner_alone(run_dir: RunDir, secrets: Any) -> None:
    write_job_files(run_dir, config := parse(secrets), "a" * 64)
    write_config(other := run_dir.path / "other.yaml", config)
    assert [stat.S_IMODE(file.stat().st_mode) for file in (run_dir.config, other)] == [0o600] * 2
    assert load(run_dir.config) == load(other) == config


async def test_what_a_job_needs_is_put_back(run_dir: RunDir) -> None:
    write_job_files(run_dir, Config(), "a" * 64)
    claim = Claim(run_dir.path, FolderOwner.of("job", "a" * 64)).take("job.name", "job", "")
    told: list[str] = []
    keeping = asyncio.create_task(JobFiles(run_dir).keep(claim, lambda row: told.append(row["reason"])))
    await asyncio.sleep(0)
    key, admin = run_dir.checkpoint_key.read_text(), run_dir.admin_token.read_text()
    run_dir.token.unlink()
    run_dir.admin_token.write_text("\n")
    run_dir.config.write_bytes(b"\xff: [")
    run_dir.checkpoint_key.unlink()
    run_dir.checkpoint_key.mkdir()
    await async_until(lambda: len(told) == 4, "all four")
    assert (run_dir.token.read_text(), run_dir.admin_token.read_text()) == ("a" * 64, admin)
    assert run_dir.checkpoint_key.read_text() == key
    assert load(run_dir.config) == Config()
    assert stat.S_IMODE(run_dir.token.stat().st_mode) == 0o600
    assert len(list(run_dir.path.glob("*.damaged-*"))) == 3
    run_dir.token.write_text("b" * 64)  # an operator may replace it
    run_dir.admin_token.unlink()
    run_dir.config.unlink()
    os.mkfifo(run_dir.config)
    os.mkfifo(run_dir.supervisor)
    assert read_json(run_dir.supervisor) is None
    await async_until(lambda: len(told) == 6, "another look, which a pipe does not hold up")
    keeping.cancel()
    assert run_dir.token.read_text() == "b" * 64
    claim.release()

"""What a replica that is told where its lighthouse is does with a run directory."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ft_hsdp.config import parse
from ft_hsdp.errors import LighthouseUnreachable
from ft_hsdp.launch import backend, standalone
from ft_hsdp.launch.run.directory import RunDir, claim, read_json, write_job_files, write_json
from ft_hsdp.launch.supervisor import Outcome
from lighthouse.quorum.state import Policy
from lighthouse.store import SqliteStore

NOBODY = "http://127.0.0.1:1"


def test_a_token_that_is_there_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All pods of a job may have one folder: a file that is written anew is empty for a moment."""
    config = parse({"job": {"name": "job", "runs_dir": str(tmp_path)}, "timeouts": {"reach_s": 0.01}})
    token = tmp_path / "job/token"

    def start(secret: str) -> None:
        monkeypatch.setenv("FT_HSDP_TOKEN", secret)
        with pytest.raises(LighthouseUnreachable):
            standalone.replica(config, 0, NOBODY)

    start("a" * 64)
    assert (token.read_text(), read_json(tmp_path / "job/lighthouse.json")["urls"]) == ("a" * 64, [NOBODY])
    os.utime(token, (0, 0))
    start("a" * 64)
    assert token.stat().st_mtime == 0
    start("b" * 64)
    assert token.read_text() == "b" * 64


@pytest.mark.parametrize(
    ("kind", "stopped", "rank", "code"),
    [
        ("done", [], 0, 0),
        ("drained", [], None, 0),
        ("config", [], 64, 64),
        ("lost", [], 76, 76),
        ("lost", [], -9, 75),
        ("stopped", [15, 15], 76, 143),
    ],
)
def test_a_scheduler_is_told_what_to_do(kind: str, stopped: list[int], rank: int | None, code: int) -> None:
    """76 wants another machine, 75 another try."""
    assert standalone.exit_code(Outcome(kind, "why"), stopped, rank) == code


@pytest.mark.parametrize("finished", [False, True])
def test_a_lighthouse_goes_on_with_a_run_until_its_store_says_that_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: bool
) -> None:
    """The first replica that is done writes its final state while the others still train."""
    config = parse({"job": {"name": "job", "runs_dir": str(tmp_path)}})
    run = RunDir(tmp_path / "job")
    claim(run)
    write_job_files(run, config)
    token = run.token.read_text()
    run.final(0).parent.mkdir(parents=True)
    write_json(run.final(0), {"step": config.train.steps})
    run.replica(1).mkdir(parents=True)
    store = SqliteStore(run.path / "lighthouse/store.sqlite")
    store.save(replace(store.load(Policy(slots=2, steps=10)), finished=finished))
    store.close()
    started: list[list[str]] = []
    monkeypatch.setattr(standalone.follow, "start", lambda _: None)
    monkeypatch.setattr("os.execve", lambda program, command, _: started.append(command))
    standalone.lighthouse(config)
    assert len(started) == 1
    assert (run.token.read_text() == token) is not finished
    assert run.final(0).exists() is not finished


@pytest.mark.parametrize(("code", "left"), [(0, ""), (75, ""), (64, "64 node7\n"), (76, "76 node7\n")])
def test_a_rank_of_torchrun_leaves_a_code_that_no_start_mends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, left: str
) -> None:
    config = parse({"job": {"name": "job", "runs_dir": str(tmp_path)}})
    folder = RunDir(tmp_path / "job").replica(1)
    folder.mkdir(parents=True)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("SLURMD_NODENAME", "node7")
    monkeypatch.setattr(standalone, "wait_for_lighthouse", lambda *_: (NOBODY,))
    monkeypatch.setattr(standalone, "prepare_data", lambda _: None)
    monkeypatch.setattr(backend, "entry", SimpleNamespace(main=lambda *_: code), raising=False)
    assert standalone.replica(config, 1) == code
    assert {file.name: file.read_text() for file in folder.iterdir()} == ({"ended-3": left} if left else {})

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ft_hsdp.jsonl import replace_json
from ft_hsdp.launch import cli
from ft_hsdp.launch.backend.processes import environment
from ft_hsdp.launch.cli import main
from ft_hsdp.launch.run.directory import RunDir
from ft_hsdp.lifetime import identity
from tests.support.launch.launch_rows import event, written

HOST = socket.gethostname()
ROOT = Path(__file__).parents[2]
HELD = ("--holder", "0")  # as the child of a holder, which writes where the test reads


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A small job's file; relative paths lie in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FT_HSDP_TOKEN", raising=False)
    (tmp_path / "text").write_bytes(b"to be or not to be\n" * 5000)
    (tmp_path / "c.yaml").write_text("job: {name: job}\ndata: {path: text}\n")
    return "c.yaml"


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["up"], 64, "CONFIG"),
        (["up", "none.yaml"], 64, "config file: got 'none.yaml'"),
        (["up", "c.yaml", "--train.steps=minus"], 64, "train.steps: got 'minus'"),
        (["up", "c.yaml", "--no.such=1"], 64, "no"),
        (["up", "c.yaml", "--train.steps"], 64, "unrecognized arguments: --train.steps"),
        (["up", "c.yaml", "more"], 64, "unrecognized arguments: more"),
        (["up", "c.yaml", "--steps", "5"], 64, "--steps 5; an override is one word: --dotted.key=value"),
        (["up", "c.yaml", "--job.runs_dir=c.yaml/runs"], 64, "job.runs_dir: got"),
        (["up", "c.yaml", "train.steps=3"], 64, "an override begins with two dashes: --train.steps=3"),
        (["up", "c.yaml", "--data.path=none"], 64, "data.path: got 'none'"),
        (["up", "c.yaml", "--network.port=PORT"], 64, "network.port: got"),
        (["doctor", "none.yaml"], 64, "config file"),
        (["replica", "c.yaml"], 64, "--replica"),
        (["replica", "c.yaml", "--replica", "9", *HELD], 64, "--replica: got 9; allowed: 0 to 2"),
        (["replica", "c.yaml", "--replica", "0", "--lighthouse", "http://127.0.0.1:1", *HELD], 64, "HSDP_TOKEN"),
        (["status"], 69, "no job runs"),
        (["status", "--run", "none"], 64, "run: got 'none'"),
        (["status", "--x=1"], 64, "unrecognized arguments: --x=1"),
        (["chaos", "none", "--replica", "0"], 64, "run: got 'none'"),
        (["chaos", "none", "--replica", "0", "--signal", "HUP"], 64, "--signal"),
        (["chaos", "none"], 64, "--replica: got None; allowed: the id of a replica"),
        (["chaos", "none", "--replica", "0", "--kind", "fire"], 64, "--kind: got 'fire'; allowed: signal, "),
        (["up", "c.yaml", "--memory.copies=4"], 64, "memory.copies: got 4; allowed: at most 3 here (4 copies on"),
        (["explain", "none"], 64, "run: got 'none'"),
        (["replay", "none"], 64, "run: got 'none'"),
        (["submit", "none.yaml"], 64, "config file: got 'none.yaml'"),
        (["submit", "c.yaml", "--ray-address", "127.0.0.1:1"], 69, "nothing answers at 127.0.0.1:1"),
        (["submit", "c.yaml", "--ray-address", "ray://head:10001"], 64, "--ray-address: got 'ray://head:10001'"),
        (["submit", "c.yaml", "--ray-address", "http://127.0.0.1:1"], 69, "nothing answers at http://127.0.0.1:1"),
        (["status", "--ray-address", "127.0.0.1:1"], 69, "nothing answers at 127.0.0.1:1"),
        (["status", "--ray-address", "http://127.0.0.1:1"], 64, "--ray-address: got 'http://127.0.0.1:1'"),
        (["render", "c.yaml"], 64, "TARGET"),
        (["render", "jobset", "c.yaml"], 64, "--image"),
        (["scale", "nowhere", "2"], 64, "run: got 'nowhere'"),
        (["scale", "nowhere", "many"], 64, "N: invalid int value"),
        (["trace", "nowhere"], 64, "run: got 'nowhere'"),
        (["verify", "nowhere"], 64, "run: got 'nowhere'"),
        (["drain", "nowhere"], 64, "--replica"),
        (["bench"], 64, "what"),
        (["bench", "speed"], 64, "speed"),
        (["dance"], 64, "dance"),
        ([], 64, "COMMAND"),
        (["--version-of-nothing"], 64, ""),
    ],
)
def test_bad_input_gets_one_line_and_its_code(config, capsys, argv, code, said) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main([word.replace("PORT", port) for word in argv]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert said in err
    assert not Path("runs/job").exists()


def test_a_terminal_that_has_ascii_alone_shows_a_name(config: str) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    with contextlib.redirect_stderr(terminal):
        assert main(["up", "n\xe4me.yaml"]) == 64
    assert b"n\\xe4me.yaml" in terminal.buffer.getvalue()


@pytest.mark.parametrize("text", ["a: [1, 2\n", "replicas: many\n", "no_such_key: 1\n", "- 1\n", "\x00"])
def test_a_bad_file_gets_one_line(config: str, capsys: pytest.CaptureFixture[str], text: str) -> None:
    Path("bad.yaml").write_text(text)
    for command in ("up", "doctor", "lighthouse"):
        assert main([command, "bad.yaml"]) == 64
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_help_needs_no_torch_and_no_numpy() -> None:
    code = "import sys; from ft_hsdp.launch.arguments import build_parser; build_parser().format_help(); " + (
        "print([m for m in ('torch', 'numpy', 'httpx', 'rich') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_an_unreachable_lighthouse_is_69_with_one_line(config, capsys, monkeypatch) -> None:
    soon = "--timeouts.reach_s=0.2"
    assert main(["replica", config, "--replica", "0", soon, *HELD]) == 69
    assert "ft-hsdp lighthouse" in capsys.readouterr().err
    monkeypatch.setenv("FT_HSDP_TOKEN", "ab" * 32)
    assert main(["replica", config, "--replica", "0", "--lighthouse", "http://127.0.0.1:1", soon, *HELD]) == 69
    err = capsys.readouterr().err
    assert "http://127.0.0.1:1" in err
    assert len(err.splitlines()) == 1


def test_status_is_one_json_document(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = _run()
    replace_json(run.supervisor, identity())
    replace_json(run.lighthouse, {"pid": os.getpid(), "url": "http://127.0.0.1:1"})
    ranks = [
        {"rank": 0, "pid": os.getpid(), "host": HOST, "state": "running"},
        {"rank": 1, "pid": 2**22 + 1, "host": HOST, "state": "running"},
    ]
    replace_json(run.processes(1), {"replica": 1, "incarnation": "1-a-0", "restarts": 0, "ranks": ranks})
    for argv in (
        ["status", "--json"],
        ["status", "--json", "--run", "job"],
        ["status", "--json", "--run", "runs/job"],
    ):
        assert main(argv) == 0
        out, err = capsys.readouterr()
        picture: dict[str, Any] = json.loads(out)
        assert err == ""
        assert picture.keys() == {"job", "step", "epoch", "lighthouse", "replicas"}
        assert picture["lighthouse"] == {"pid": os.getpid(), "url": "http://127.0.0.1:1"}
        assert [r["state"] for r in picture["replicas"]] == ["exited", "running", "exited"]
        assert [r["state"] for r in picture["replicas"][1]["ranks"]] == ["running", "exited"]
    assert main(["status"]) == 0
    assert f"pid {os.getpid()} running" in capsys.readouterr().out


def test_explain_tells_every_decision_with_its_reason_and_each_failure(config, capsys) -> None:
    run = _run()
    exited = event("ReplicaExited", 12.5, replica=1, kind="SIGKILL", incarnation="1-a-0", rank=1)
    granted = event("EpochGranted", 10.0, epoch=1, step=1, members=[0, 1, 2])
    written(run.events, granted, exited, event("SomethingNew", 13.0, replica=1, rank=0))
    failure = {"t": 12.4, "replica": 1, "rank": 1, "kind": "SIGKILL", "detect_s": 0.003, "stall_s": 0.4}
    replace_json(run.summary, {"failures": [{**failure, "rejoin_s": 3.9, "source": "0"}], "lost": [2]})
    assert main(["explain", "job"]) == 0
    text = capsys.readouterr().out
    assert [line.split()[0] for line in text.splitlines()[:3]] == ["0.000", "2.500", "3.000"]
    assert text.count("because") == 3
    assert "SomethingNew replica 1" in text
    for figure in ("3 ms", "0.40 s", "3.90 s", "replica 2 was lost"):
        assert figure in text
    assert main(["explain", "job", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["events"]) == 3


def test_without_a_supervisor_explain_reads_what_each_process_logged(config, capsys) -> None:
    run = _run()
    for path, t in ((run.lighthouse_events, 2.0), (run.replica_events(0), 1.0), (run.injections(0), 3.0)):
        written(path, event("Waiting", t))
    assert main(["explain", "runs/job"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["0.000", "1.000", "2.000"]


def _run() -> RunDir:
    run = RunDir(Path("runs/job").resolve())
    run.path.mkdir(parents=True)
    run.config.write_text(Path("c.yaml").read_text())
    run.token.write_text("ab" * 32)
    return run


def test_examples_are_the_files_of_configs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["example"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
    for name in listed:
        assert cli.main(["example", name]) == 0
        assert capsys.readouterr().out == (ROOT / "configs" / f"{name}.yaml").read_text()
    assert cli.main(["example", "none"]) == 64
    assert "allowed: constant" in capsys.readouterr().err


def test_an_error_of_the_disk_is_one_line(monkeypatch, capsys) -> None:
    def full(_: object) -> int:
        raise OSError(28, "No space left on device", "runs/job/trace.json")

    monkeypatch.setitem(cli.COMMANDS, "schema", full)
    assert cli.main(["schema"]) == 75
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("runs/job/trace.json: ")


def test_an_interpreter_without_our_packages_is_told_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-S", str(ROOT / "launcher.py"), "status"], env={}, capture_output=True, text=True
    )
    assert done.returncode == 64
    (line,) = done.stderr.splitlines()
    assert "has no module" in line
    assert ".venv/bin/activate" in line

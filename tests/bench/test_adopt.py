from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import adopt
from benchmarks.adopt import AdoptOptions, ExampleUnderTest, KilledJob, example, interpreter, kill_row
from benchmarks.under_ray import BenchCluster
from ft_hsdp.bench.hsdp.processes import HsdpSetup
from ft_hsdp.bench.recovery.analysis import Stall
from ft_hsdp.bench.recovery.job_under_test import UnderTest
from ft_hsdp.bench.recovery.setup import RecoverySetup, job_config
from ft_hsdp.bench.results import ProgressLog, spread
from ft_hsdp.bench.trainee import add_waits
from ft_hsdp.config import load
from ft_hsdp.config.entry import locate
from ft_hsdp.errors import ConfigError, Retryable
from ft_hsdp.launch.run.directory import RunDir, write_json
from tests.support.bench.tables import shown


def test_options() -> None:
    nothing = dict.fromkeys(("measure", "kills", "rounds"))
    assert adopt.options(Namespace(**nothing)) == AdoptOptions(("step", "kill"), 7, 20)
    assert adopt.options(Namespace(measure="kill", kills=3, rounds=2)) == AdoptOptions(("kill",), 3, 2)
    with pytest.raises(ConfigError, match="--measure"):
        adopt.options(Namespace(measure="steady", kills=3, rounds=2))


def environment(root: Path, name: str) -> Path:
    """An environment as make leaves it."""
    python = root / ".venvs" / name / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    (root / ".venvs" / name / ".installed").touch()
    return python


def test_the_interpreter_is_that_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adopt, "ROOT", tmp_path)
    python = environment(tmp_path, "fabric")
    assert interpreter("fabric") == str(python)
    assert interpreter("accelerate") == ""
    assert interpreter("fabric", "json") == sys.executable  # this one has it already
    assert interpreter("fabric", "no_such_package") == str(python)
    (tmp_path / ".venvs" / "fabric" / ".installed").unlink()  # make was interrupted
    assert interpreter("fabric") == ""


def test_what_is_not_installed_is_left_out_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adopt, "ROOT", tmp_path)
    environment(tmp_path, "accelerate")
    asked: list[tuple[str, str, int]] = []

    def kill(trainer: str, python: str, count: int, log: ProgressLog) -> dict[str, Any]:
        asked.append((trainer, python, count))
        return {}

    monkeypatch.setattr(adopt, "_kill", kill)
    log = ProgressLog(io.StringIO())
    assert adopt.kills(5, log, ("fabric", "accelerate")) == [{}]
    assert asked == [("accelerate", str(tmp_path / ".venvs" / "accelerate" / "bin" / "python"), 5)]
    assert log.notes == ["fabric is left out: not installed (make .venvs/fabric/.installed)"]


@pytest.mark.parametrize("found", [True, False])
def test_without_transformers_the_model_is_the_built_in_one(monkeypatch: pytest.MonkeyPatch, found: bool) -> None:
    seen: list[tuple[bool, str]] = []

    def steady(rounds: int, log: ProgressLog, setup: HsdpSetup, transports: Any, python: str) -> list[Any]:
        assert (rounds, setup.replicas, setup.ranks, setup.sections["optim"]) == (9, 2, 2, {"clip": 1.0})
        seen.append((setup.hugging_face, python))
        return [{"rounds": rounds}]

    monkeypatch.setattr(adopt, "steady", steady)
    monkeypatch.setattr(adopt, "interpreter", lambda *_: "/venv/python" if found else "")
    log = ProgressLog(io.StringIO())
    rows = adopt.step(9, log)
    assert seen == [(found, "/venv/python" if found else sys.executable)] * 2
    assert [(row["step"], row["model"]) for row in rows] == [
        (kind, "transformers" if found else "built-in") for kind in ("computing", "waiting")
    ]
    assert [note.partition(" (")[0] for note in log.notes] == [] if found else ["transformers is not installed"]


@pytest.mark.parametrize("trainer", adopt.TRAINERS)
def test_the_job_of_an_example_is_that_of_its_configuration(
    trainer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = example(trainer)
    assert json.loads(json.dumps(setup.sections)) == setup.sections  # as it goes to the job
    config = job_config(setup, tmp_path)
    assert (config.replicas, config.ranks_per_replica, config.job.runs_dir) == (2, 2, str(tmp_path))
    assert config.entry is not None
    monkeypatch.chdir(adopt.ROOT)
    assert locate(config.entry).resolve().parent == adopt.ROOT / "examples" / trainer
    assert config.train.steps == setup.sections["train"]["steps"] >= 60
    whole = ("adapt", "per_replica") if trainer == "torchtitan" else ("constant", "global")
    assert (config.quorum.batch, config.data.assignment) == whole


@pytest.mark.parametrize("trainer", ["torchtitan", "ray_train"])
def test_an_example_runs_where_its_paths_are_those_of_a_clone(
    trainer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the interpreter of its environment, and on the cluster if it needs one."""
    seen: list[tuple[list[str], Mapping[str, str]]] = []

    def spawn(stack: Any, command: list[str], log: Path, env: Mapping[str, str], cwd: Path, **_: Any) -> None:
        monkeypatch.chdir(cwd)
        file = locate(load(Path(command[-2] if trainer in adopt.ON_RAY else command[-1])).entry or "")
        assert file.resolve().parent == adopt.ROOT / "examples" / trainer
        seen.append((command, env))

    monkeypatch.setattr("ft_hsdp.bench.recovery.job_under_test.spawn", spawn)
    cluster = BenchCluster("/venv/python") if trainer in adopt.ON_RAY else None
    with ExampleUnderTest(example(trainer), "/venv/python", cluster):
        ((command, env),) = seen
    assert command[0] == "/venv/python"
    assert env["HF_HUB_OFFLINE"] == "1"
    if cluster is not None:
        assert command[-1] == cluster.address
        assert env["RAY_AUTH_TOKEN"] == cluster.env["RAY_AUTH_TOKEN"]


def test_a_rank_on_a_cluster_of_this_machine_is_killed_by_its_pid(tmp_path: Path) -> None:
    job = ExampleUnderTest(example("ray_train"), sys.executable, BenchCluster())
    job.run = RunDir(tmp_path)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as rank:
        ranks = [{"rank": 0, "pid": 0}, {"rank": 1, "pid": rank.pid}]
        write_json(job.run.processes(1), {"incarnation": "1-ab-0", "ranks": ranks})
        kill = job.kill(1, 1)
    assert rank.returncode == -signal.SIGKILL
    assert (kill.replica, kill.rank, kill.incarnation) == (1, 1, "1-ab-0")


class LoggedJob(UnderTest):
    """A job whose steps are there, one for each look."""

    def __init__(self, steps: int, contributors: list[int]) -> None:
        super().__init__(RecoverySetup(replicas=2))
        self._coming = iter(range(1, steps + 1))
        self._contributors = contributors

    def _begin(self, folder: Path) -> None:
        raise AssertionError

    def _processes(self) -> list[Any]:
        return []

    def read(self) -> None:
        step = next(self._coming)
        for rows in self.rows.values():
            rows.append({"step": step, "contributors": self._contributors})


def test_nothing_is_waited_for_after_the_last_step() -> None:
    assert LoggedJob(5, [0, 1]).wait_for_all(last=8)
    alone = LoggedJob(9, [0])
    assert not alone.wait_for_all(last=8)
    assert alone.rows[0][-1]["step"] == 9


def job(*less_one_ms: float, twice: int = 0, skipped: int = 0, digests: str = "aa") -> KilledJob:
    stalls = [Stall(ms / 1e3 + 0.1, ms / 1e3, ms / 1e3 + 0.02, 0) for ms in less_one_ms]
    batches = {"trained": 600, "duplicated": twice, "skipped": skipped}
    replicas = {str(n): {"digest": digest} for n, digest in enumerate(digests)}
    return KilledJob(0.1, stalls, {"steps": 150, "batches": batches, "replicas": replicas})


def row(trainer: str, *jobs: KilledJob) -> dict[str, Any]:
    return kill_row(trainer, RecoverySetup(replicas=2, ranks=2), jobs)


def test_the_jobs_of_a_trainer_are_summed_up() -> None:
    found = row("fabric", job(10, 30, twice=1), job(20, skipped=2, digests="ab"))
    assert (found["jobs"], found["kills"], found["step_ms"]) == (2, 3, 100.0)
    assert found["less_one"] == {"p50_ms": 20.0, "p99_ms": 30.0, "max_ms": 30.0, "count": 3}
    assert [found[key] for key in ("trained", "twice", "skipped", "differ")] == [1200, 1, 2, 1]
    with pytest.raises(Retryable, match="fabric has too few steps"):
        row("fabric", job())


def steps(kind: str, ratios: Mapping[str, float]) -> dict[str, Any]:
    figures = spread([0.5, 0.6])
    times = {name: {"ratio": ratio, "low": ratio - 0.01, "high": ratio + 0.01} for name, ratio in ratios.items()}
    crews = dict.fromkeys(("hsdp", *ratios), figures)
    return {"step": kind, "model": "transformers", "replicas": 2, "ranks": 2, "crews": crews, "times": times}


def test_goals_and_tables() -> None:
    ratios = {"hsdp again": 1.01, "ft_hsdp, tcp": 1.06, "ft_hsdp, shm": 1.04}
    killed = [row("fabric", job(10)), row("transformers", job(150, twice=1, skipped=1, digests="ab"))]
    result = {"step": [steps("computing", ratios), steps("waiting", ratios)], "kill": killed}
    seen = [(verdict.text, verdict.seen, verdict.met) for verdict in adopt.goals(result)]
    assert seen == [
        ("computing, ft_hsdp, tcp: a step, times HSDP's", 1.06, False),
        ("computing, ft_hsdp, shm: a step, times HSDP's", 1.04, True),
        ("waiting, ft_hsdp, tcp: a step, times HSDP's", 1.06, False),
        ("waiting, ft_hsdp, shm: a step, times HSDP's", 1.04, True),
        ("fabric: SIGKILL to next commit - 1 step, p50 ms", 10.0, True),
        ("fabric: units twice or skipped, other states", 0, True),
        ("transformers: SIGKILL to next commit - 1 step, p50 ms", 150.0, False),
        ("transformers: units twice or skipped, other states", 3, False),
    ]
    text = shown(result, adopt.goals(result))
    assert "step: step waiting, model transformers" in text
    assert "kill: trainer transformers" in text


def test_layers_wait_in_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("ft_hsdp.bench.trainee.time.sleep", slept.append)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    plain = model(torch.ones(1, 2))
    add_waits(list(model), 0.6)
    output = model(torch.ones(1, 2))
    assert torch.equal(output, plain)
    assert slept == pytest.approx([0.1, 0.1])
    output.sum().backward()
    assert slept[2:] == pytest.approx([0.2, 0.2])


@pytest.mark.proof
@pytest.mark.multiproc
@pytest.mark.usefixtures("_nothing_left")
@pytest.mark.timeout(240)
def test_a_tiny_llama_trains_in_turn_with_hsdp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of torch alone, 2 x 2 ranks; each step waits as long as it is told, in both."""
    sections: dict[str, dict[str, Any]] = {
        "train": {"micro_batch": 1, "seq_len": 8},
        "model": {"dim": 8, "layers": 1, "heads": 1},
        "optim": {"clip": 1.0},
    }
    monkeypatch.setattr(adopt, "interpreter", lambda *_: "")
    monkeypatch.setattr(adopt, "TRANSPORTS", ("shm",))
    setups = {"waiting": HsdpSetup(replicas=2, sections=sections, wait_s=0.03)}
    (found,) = adopt.step(2, ProgressLog(io.StringIO()), setups)
    assert {name: crew["count"] for name, crew in found["crews"].items()} == dict.fromkeys(
        ("hsdp", "hsdp again", "ft_hsdp, shm"), 2
    )
    assert min(crew["min_ms"] for crew in found["crews"].values()) > 30

"""Ray Train: examples/ray_train as its page has it, and what is refused. Run by `make integration-ray_train`."""

import json
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.train
import ray.train.collective
import torch
from ray.train import Checkpoint
from ray.train.torch import TorchConfig, get_device
from ray.train.v2.api.config import FailureConfig, RunConfig, ScalingConfig

from ft_hsdp.config.loader import parse
from ft_hsdp.integrations import ray_train
from ft_hsdp.integrations.ray_train import FtHsdpTorchTrainer, RankUtils, prepare_data_loader
from ft_hsdp.train import join
from tests.support.framework_job import COUNTING, ExampleJob, Page, check_kill
from tests.support.launch.ray_cluster import Cluster
from tests.support.refused import refused

pytestmark = pytest.mark.integration
STEPS, AT, VICTIM = 150, 40, 1


@pytest.mark.timeout(600)
def test_the_page_word_for_word(tmp_path: Path) -> None:
    with Cluster() as cluster:
        cluster.add(4)
        page = Page("ray_train", tmp_path, {**cluster.env, "RAY_ADDRESS": cluster.address})
        plain, train, killed, waits = page.commands()
        page.run(plain)
        logs = (cluster.folder / "ray").glob("session_latest/logs/worker-*.out")
        losses = re.findall(r"^epoch \d: loss (.*)$", "\n".join(log.read_text() for log in logs), re.MULTILINE)
        assert len(losses) == 5
        assert float(losses[-1]) < 0.5 * float(losses[0])
        said = page.run(train)
        assert said.rstrip().endswith(str(tmp_path / "runs" / "ray-train")), "fit() did not return to the script"
        page.run(killed)
        check_kill(tmp_path / "runs" / "killed", VICTIM, STEPS)
        page.run(waits)
        assert not cluster.ours()
    runs = [tmp_path / "runs" / name for name in ("ray-train", "waits")]
    assert reported(runs[0]) == reported(runs[1])
    with ExampleJob("ray_train", tmp_path, "own", entry=COUNTING, args=["ray_train"]) as job:
        own = job.finish(STEPS)
    assert [digest(run) for run in runs] == [own, own]


def digest(run: Path) -> str:
    """The digest of the state that all replicas ended with."""
    summary = json.loads((run / "summary.json").read_text())
    (same,) = {replica["digest"] for replica in summary["replicas"].values()}
    return str(same)


def reported(run: Path) -> list[dict[str, float]]:
    """What the train loop reported, by step: once for each epoch, whatever was lost."""
    result = ray_train._result(run)
    rows = result.metrics_dataframe.to_dict("records")
    assert [(row["step"], row["epoch"]) for row in rows] == [(30 * (n + 1), n) for n in range(5)]
    assert result.metrics == {"epoch": 4.0, "loss": rows[-1]["loss"]}
    return rows


# What is refused: no cluster, no job.


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is rank 1 of a replica of two, in which the train loop runs."""
    places = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "::1"}
    for name, value in places.items():
        monkeypatch.setenv(name, value)
    ray_train.set_train_fn_utils(RankUtils(parse({"job": {"name": "mine"}})))
    yield
    ray_train.set_train_fn_utils(None)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that the launcher would run; they end well, but leave no run."""
    ran: list[list[str]] = []
    monkeypatch.setattr(ray_train, "_run", lambda words: ran.append(words) or 3)
    monkeypatch.setattr("sys.argv", ["train.py"])
    monkeypatch.setattr("__main__.__file__", "train.py", raising=False)  # a worker of xdist has none
    return ran


def trainer(folder: Path, document: str = "", loop: Any = dict, **settings: Any) -> FtHsdpTorchTrainer:
    """A trainer of a job of 2 replicas of 2 ranks."""
    file = folder / "job.yaml"
    replicas = "" if document.startswith("replicas:") else "replicas: 2"
    file.write_text(f"job: {{name: mine}}\n{replicas}\nranks_per_replica: 2\n{document}\n")
    return FtHsdpTorchTrainer(
        loop, job_config=file, **{"scaling_config": ScalingConfig(num_workers=4), **settings}
    )


def ended(call: Callable[[], object]) -> object:
    """The exit code with which a call ends this process."""
    with pytest.raises(SystemExit) as caught:
        call()
    return caught.value.code


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"scaling_config": ScalingConfig(num_workers=2)}, "num_workers.*got 2; .*ranks_per_replica.* is 4"),
        ({"scaling_config": ScalingConfig(num_workers=(2, 4))}, "num_workers"),
        ({"scaling_config": ScalingConfig(num_workers=4, use_gpu=True)}, "use_gpu.*train.device.* cpu"),
        ({"scaling_config": ScalingConfig(num_workers=4, resources_per_worker={"CPU": 2})}, "ray.resources"),
        ({"scaling_config": ScalingConfig(num_workers=4, placement_strategy="SPREAD")}, "ray.strategy"),
        ({"run_config": RunConfig(failure_config=FailureConfig(max_failures=3))}, "failure_config.*restart"),
        ({"run_config": RunConfig(storage_path="/tmp/x")}, "storage_path.*job.runs_dir"),
        ({"run_config": RunConfig(name="not a name")}, "job.name"),
        ({"datasets": {"train": [1]}}, "datasets.*job.loader"),
        ({"torch_config": TorchConfig()}, "torch_config.*train.device"),
        ({"document": "entry: other.py"}, "entry: got 'other.py'; .*train.py, the script that calls fit"),
        ({"document": "entry: train.py\nargs: [--fast]"}, "args"),
        ({"document": "replicas: 3"}, "num_workers.*is 6"),
    ],
)
def test_what_has_no_meaning_is_refused_in_one_line(tmp_path, launched, capsys, settings, words) -> None:
    assert ended(trainer(tmp_path, **settings).fit) == 64
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(words, line), line
    assert not launched


def test_arguments_that_ray_does_not_have_either_are_errors_of_the_program(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="workers"):
        trainer(tmp_path, workers=4)


def test_the_launcher_gets_what_the_script_says(tmp_path, launched, monkeypatch) -> None:
    assert ended(trainer(tmp_path).fit) == 3, "not the exit code of the job"
    monkeypatch.setattr("sys.argv", ["train.py", "--width", "8"])
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="::1:6379"))
    ended(trainer(tmp_path, "entry: ./train.py", run_config=RunConfig(name="other")).fit)
    first, second = launched
    assert first == ["submit", str(tmp_path / "job.yaml"), '--entry="train.py"']
    assert second[2:] == ["--ray-address", "::1:6379", '--job.name="other"', '--args=["--width", "8"]']


def test_a_notebook_is_refused(tmp_path, launched, monkeypatch, capsys) -> None:
    monkeypatch.delattr("__main__.__file__", raising=False)
    assert ended(trainer(tmp_path).fit) == 64
    assert "a notebook cannot run in a rank" in capsys.readouterr().err
    assert not launched


def test_signals_are_passed_on_to_the_launcher_once(monkeypatch: pytest.MonkeyPatch) -> None:
    child = """
import os, signal, sys
seen = []
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
for number in (signal.SIGINT, signal.SIGTERM):
    os.kill(os.getppid(), number)
    seen.append(signal.sigwait([signal.SIGINT, signal.SIGTERM]) == number)
alone = os.getsid(0) == os.getpid()  # a terminal's Ctrl-C does not reach it, too
sys.exit(7 if alone and all(seen) and not signal.sigpending() else 1)
"""
    monkeypatch.setattr(ray_train, "_SUBMIT", child)
    before = signal.getsignal(signal.SIGTERM)
    assert ray_train._run([]) == 7
    assert signal.getsignal(signal.SIGTERM) is before
    monkeypatch.setattr(ray_train, "_SUBMIT", "import os; os.kill(os.getpid(), 9)")
    assert ray_train._run([]) == 137


class Stub(SimpleNamespace):
    """What the functions of ``ray.train`` ask of a job."""

    def __init__(self) -> None:
        super().__init__(logged=[], logged_names=set(), left=False)

    def log(self, values: dict[str, float]) -> None:
        self.logged.append(values)


@pytest.mark.usefixtures("rank")
def test_the_functions_of_ray_train_mean_the_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    context = ray.train.get_context()
    assert (context.get_world_rank(), context.get_world_size(), context.get_node_rank()) == (1, 2, 0)
    assert (context.get_local_rank(), context.get_local_world_size()) == (1, 2)
    assert context.get_experiment_name() == "mine"
    assert ray.train.get_checkpoint() is None
    assert get_device() == torch.device("cpu")
    refused(lambda: ray.train.report({"loss": 1.0}), "after ft_hsdp.join")
    job = Stub()
    monkeypatch.setattr(join._process, "job", job)
    ray.train.report({"loss": 1.0})
    assert job.logged == [{"loss": 1.0}]
    refused(lambda: ray.train.report({}, checkpoint=Checkpoint("/tmp")), "checkpoint.dir and checkpoint.every")
    refused(lambda: ray.train.get_dataset_shard("train"), "'train'.*job.loader")
    refused(ray.train.collective.barrier, "after ft_hsdp.join")
    refused(lambda: ray.train.collective.broadcast_from_rank_zero({}), "torch.distributed.broadcast")
    refused(context.get_storage, "checkpoint.dir")


@pytest.mark.usefixtures("rank")
@pytest.mark.parametrize("loop", [lambda config: ran.append(config), lambda: ran.append({"lr": 1})])
def test_a_rank_runs_the_loop_and_does_not_return(tmp_path, monkeypatch, loop) -> None:
    ran.clear()
    made = trainer(tmp_path, loop=loop, train_loop_config={"lr": 1})
    monkeypatch.setenv("FT_HSDP_CONFIG", str(tmp_path / "job.yaml"))
    monkeypatch.setenv("FT_HSDP_REPLICA", "0")
    assert ended(made.fit) == 0
    assert ran == [{"lr": 1}]
    made.scaling_config.num_workers = 2
    assert ended(made.fit) == 64
    assert ran == [{"lr": 1}]


ran: list[dict[str, int]] = []


def test_a_loader_of_the_job_is_taken_as_it_is() -> None:
    config = SimpleNamespace(train=SimpleNamespace(steps=6, accumulate=2))
    job: Any = SimpleNamespace(config=config)
    loader: Any = SimpleNamespace(steps_per_epoch=3)
    assert len(prepare_data_loader(job, loader)) == 6
    loader.steps_per_epoch = 0
    refused(lambda: prepare_data_loader(job, loader), "DataLoader.batch_size")

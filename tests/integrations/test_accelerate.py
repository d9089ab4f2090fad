"""Accelerate: examples/accelerate as its page has it, and what is refused."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.stub import Stub
from tests.support.framework_job import COUNTING, ExampleJob, Page, check_kill
from tests.support.refused import refused
from tests.support.scenarios.scenario_job import Job

pytestmark = pytest.mark.integration
STEPS, AT, VICTIM = 150, 40, 1


def test_the_page_word_for_word(tmp_path: Path) -> None:
    page = Page("accelerate", tmp_path)
    plain, *ups = page.commands()
    losses = [float(x) for x in re.findall(r"^epoch \d: loss (.*)$", page.run(plain), re.MULTILINE)]
    assert len(losses) == 5
    assert losses[-1] < 0.5 * losses[0]
    for up in ups:
        page.run(up)
    check_kill(tmp_path / "runs" / "killed", VICTIM, STEPS)


def test_the_weights_are_those_of_our_own_loop(tmp_path: Path) -> None:
    kill = {"at_step": AT, "replicas": [VICTIM], "rank": 1}
    with ExampleJob("accelerate", tmp_path, "killed", chaos=[kill], quorum__min_replicas=2) as job:
        killed = job.finish(STEPS)
        assert len(job.events("ReplicaStarted", replica=VICTIM)) == 2
    with ExampleJob("accelerate", tmp_path, "own", entry=COUNTING, args=["accelerate"]) as job:
        assert job.finish(STEPS) == killed


# What is refused: one rank, without a job.


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, group: None) -> Iterator[None]:
    """The group, and no state of Accelerate from the test before."""
    from accelerate.state import AcceleratorState

    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("ACCELERATE_USE_FSDP", raising=False)
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def accelerated(job: Stub, **settings: Any) -> Any:
    from ft_hsdp.integrations.accelerate import FtHsdpAccelerator

    return FtHsdpAccelerator(job=job, **settings)  # type: ignore[arg-type]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"cpu": False}, "cpu.*train.device, which is cpu"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps.*train.accumulate"),
        ({"mixed_precision": "fp16"}, "mixed_precision"),
    ],
)
def test_settings_that_are_not_those_of_the_job_are_refused(settings: dict[str, Any], words: str) -> None:
    refused(lambda: accelerated(Stub(), **settings), words)


@pytest.mark.usefixtures("alone")
def test_fsdp_of_another_version_is_refused() -> None:
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=1)
    refused(lambda: accelerated(Stub(), fsdp_plugin=plugin), "fsdp_version=2")


@pytest.mark.usefixtures("alone")
def test_what_would_change_one_replica_alone_is_refused(tmp_path: Path) -> None:
    from torch.distributed.fsdp import FSDPModule

    job: Any = Stub(steps=3)
    accelerator = accelerated(job, max_norm=1.0, step_scheduler_with_optimizer=False)
    model = torch.nn.Linear(4, 4)
    inner = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.ConstantLR(inner)
    model, adam, stepped = accelerator.prepare(model, inner, scheduler)
    assert any(isinstance(module, FSDPModule) for module in model.modules())
    refused(adam.step, "prepare_train_loader")
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    refused(lambda: accelerator.clip_grad_norm_(model.parameters(), 2.0), "max_norm.*1.0")
    refused(lambda: accelerator.clip_grad_value_(model.parameters(), 1.0), "clip_grad_value_")
    refused(lambda: accelerator.no_sync(model), "train.accumulate")
    refused(lambda: accelerator.save_state(str(tmp_path)), "checkpoint")
    refused(lambda: accelerator.load_state(str(tmp_path)), "checkpoint")
    refused(lambda: accelerator.init_trackers("mine"), "docs/metrics.md")
    loader = accelerator.prepare_train_loader(job)
    assert accelerator.prepare(loader) is loader
    for batch in loader:
        accelerator.backward(model(torch.full((1, 4), float(batch))).sum())
        adam.step()
        accelerator.log({"batch": batch}, step=9)
        refused(lambda: adam.step(lambda: 0.0), "closure")
        refused(lambda: accelerator.prepare(torch.nn.Linear(1, 1)), "before the first batch")
    assert job.given == ([inner], [stepped.scheduler])
    assert job.wrapped.clip == 1.0
    assert len(job.committed) == 3
    assert all(isinstance(loss, torch.Tensor) for loss in job.committed)
    assert job.logged == [{"batch": 0}, {"batch": 1}, {"batch": 2}]
    accelerator.save({"a": 1}, tmp_path / "a.pt")
    assert (torch.load(tmp_path / "a.pt"), job.paused) == ({"a": 1}, ["saving"])


@pytest.mark.usefixtures("alone")
def test_a_scheduler_that_is_stepped_for_each_process_is_refused() -> None:
    accelerator = accelerated(Stub())
    model = torch.nn.Linear(4, 4)
    adam = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.ConstantLR(adam)
    refused(lambda: accelerator.prepare(model, adam, scheduler), "step_scheduler_with_optimizer")


def test_what_is_saved_is_the_whole_model(tmp_path: Path) -> None:
    """Two replicas write the same files at the same time; an export has the same weights."""
    from safetensors.torch import load_file

    from ft_hsdp.launch.cli import main

    loop = str(Path(__file__).with_name("accelerate_export_loop.py"))
    settings = {"replicas": 2, "entry": loop, "args": [str(tmp_path)], "checkpoint__every": 2}
    with Job(tmp_path, 2, **settings) as job:
        job.ends_at(2)
        assert [set(row["logged"]) for row in job.rows("metrics.jsonl") if "logged" in row] == [{"loss"}] * 2
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    shards = [load_file(file) for file in sorted((tmp_path / "shards").glob("*.safetensors"))]
    assert len(shards) > 1
    assert main(["export", str(job.run), str(tmp_path / "exported.safetensors")]) == 0
    whole = [tmp_path / "model" / "model.safetensors", tmp_path / "exported.safetensors"]
    for found in ({n: t for each in shards for n, t in each.items()}, *(load_file(file) for file in whole)):
        assert found.keys() == weights.keys()
        assert all(torch.equal(tensor, weights[name]) for name, tensor in found.items())
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["model.safetensors"]

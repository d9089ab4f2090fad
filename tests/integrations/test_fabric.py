"""Lightning Fabric: examples/fabric as its page has it, and what is refused. Run by `make integration-fabric`."""

import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.stub import Stub
from tests.support.framework_job import COUNTING, Page, check_kill, check_weights
from tests.support.refused import refused

pytestmark = pytest.mark.integration
STEPS, VICTIM = 90, 1


# The page word for word is two tests, which run at the same time.


def test_plain_and_killed_runs_of_the_page(tmp_path: Path) -> None:
    page = Page("fabric", tmp_path)
    plain, _, killed, _ = page.commands()
    losses = [float(x) for x in re.findall(r"^epoch \d: loss (.*)$", page.run(plain), re.MULTILINE)]
    assert len(losses) == 3
    assert losses[-1] < 0.5 * losses[0]
    page.run(killed)
    check_kill(tmp_path / "runs" / "killed", VICTIM, STEPS)


def test_other_runs_of_the_page_have_the_weights_of_our_own_loop(tmp_path: Path) -> None:
    page = Page("fabric", tmp_path)
    _, whole, _, waits = page.commands()
    check_weights(page, whole, waits, COUNTING, STEPS, args=["fabric"])


# What is refused: one rank, without a job.


def launched(job: Stub, **settings: Any) -> tuple[Any, Any]:
    from lightning.fabric import Fabric

    from ft_hsdp.integrations.fabric import FtHsdpStrategy

    ours = {name: settings.pop(name) for name in ("max_norm", "tensor_parallel_size") if name in settings}
    strategy = FtHsdpStrategy(sharded, job=job, **ours)  # type: ignore[arg-type]
    fabric = Fabric(strategy=strategy, **{"accelerator": "cpu", "devices": 1, **settings})
    fabric.launch()
    return fabric, strategy


def sharded(module: torch.nn.Module, mesh: Any) -> torch.nn.Module:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(module, mesh=mesh["data_parallel"])


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("job", "settings", "words"),
    [
        (Stub(ranks=2), {}, "devices.*ranks_per_replica, which is 2"),
        (Stub(ranks=1), {"devices": 2}, "devices.*ranks_per_replica, which is 1"),
        (Stub(ranks=1), {"num_nodes": 2}, "nodes.*ranks_per_replica, which is 1"),
        (Stub(ranks=1), {"tensor_parallel_size": 2}, "tensor_parallel_size.*ranks_per_unit, which is 1"),
    ],
)
def test_ranks_that_are_not_those_of_the_job_are_refused(job: Stub, settings: dict[str, Any], words: str) -> None:
    refused(lambda: launched(job, **settings), words)


@pytest.mark.usefixtures("group")
def test_another_device_and_a_loss_scaler_are_refused() -> None:
    from lightning.fabric.plugins import MixedPrecision

    job = Stub()
    job.device = torch.device("cuda")
    refused(lambda: launched(job), "accelerator.*train.device, which is cuda")
    scaler = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    refused(lambda: launched(Stub(), plugins=scaler), "loss scaler")


@pytest.mark.usefixtures("group")
def test_what_would_change_one_replica_alone_is_refused(tmp_path: Path) -> None:
    job = Stub()
    fabric, strategy = launched(job, max_norm=1.0)
    linear = torch.nn.Linear(4, 4)
    refused(lambda: fabric.setup(linear, torch.optim.SGD(linear.parameters())), "setup_module")
    model = fabric.setup_module(linear)
    refused(lambda: fabric.setup_module(torch.nn.Linear(4, 4)), "one module that is trained")
    fabric.setup_module(torch.nn.Linear(4, 4).requires_grad_(False))
    adam = fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))
    refused(lambda: adam.step(), "setup_dataloader")
    fabric.clip_gradients(model, adam, max_norm=1.0)
    refused(lambda: fabric.clip_gradients(model, adam, max_norm=2.0), "max_norm.*1.0")
    refused(lambda: fabric.clip_gradients(model, adam, max_norm=1.0, norm_type=1.0), "norm_type")
    refused(lambda: fabric.clip_gradients(model, adam, clip_val=1.0), "clip_val")
    refused(lambda: fabric.no_backward_sync(model, enabled=True), "train.accumulate")
    with fabric.no_backward_sync(model, enabled=False):
        pass
    loader = strategy.setup_dataloader(job)
    stranger = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(torch.nn.Linear(1, 1).parameters()))
    refused(lambda: strategy.setup_scheduler(stranger), "scheduler of an optimizer")
    for _ in loader:
        fabric.backward(model(torch.ones(1, 4)).sum())
        adam.step()
        adam.zero_grad()
        refused(lambda: adam.step(closure=lambda: 0.0), "closure")
        refused(lambda: fabric.setup_optimizers(torch.optim.SGD(model.parameters())), "before the first batch")
        refused(lambda: fabric.load(tmp_path / "x", {"model": model}), "before the first batch")
    assert job.wrapped.clip == 1.0
    assert len(job.committed) == 3
    assert all(isinstance(loss, torch.Tensor) for loss in job.committed)


@pytest.mark.usefixtures("group")
def test_a_scheduler_that_the_job_does_not_know_is_refused() -> None:
    job = Stub()
    fabric, strategy = launched(job)
    model = fabric.setup_module(torch.nn.Linear(4, 4))
    adam = fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))
    scheduler = torch.optim.lr_scheduler.ConstantLR(adam)
    loader = strategy.setup_dataloader(job)
    refused(lambda: next(iter(loader)), "setup_scheduler")
    assert strategy.setup_scheduler(scheduler) is scheduler
    assert next(iter(loader)) == 0
    assert job.given == ([adam.optimizer], [scheduler])


@pytest.mark.usefixtures("group")
def test_several_optimizers_commit_together() -> None:
    job = Stub()
    fabric, strategy = launched(job)
    model = fabric.setup_module(torch.nn.Linear(4, 4))
    one, two = fabric.setup_optimizers(torch.optim.SGD([model.weight]), torch.optim.AdamW([model.bias]))
    for _ in strategy.setup_dataloader(job):
        two.step()
        refused(two.step, "each of the 2 optimizers")
        assert len(job.committed) == job.step
        one.step()
        assert len(job.committed) == job.step + 1


@pytest.mark.usefixtures("group")
def test_files_hold_the_whole_model_and_are_put_in_place_at_once(tmp_path: Path) -> None:
    job = Stub()
    fabric, _ = launched(job)
    model = fabric.setup_module(torch.nn.Linear(4, 4))
    adam = fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))
    before = model.weight.full_tensor().clone()
    fabric.save(tmp_path / "all.ckpt", {"model": model, "adam": adam, "note": 7})
    assert [file.name for file in tmp_path.iterdir()] == ["all.ckpt"]
    assert job.paused == ["saving"]
    whole = (tmp_path / "all.ckpt").read_bytes()
    with pytest.raises((AttributeError, pickle.PicklingError)):  # torch, in the middle of the file
        fabric.save(tmp_path / "all.ckpt", {"model": model, "note": lambda: 0})
    assert (tmp_path / "all.ckpt").read_bytes() == whole
    with torch.no_grad():
        model.weight.zero_()
    assert fabric.load(tmp_path / "all.ckpt", {"model": model, "adam": adam})["note"] == 7
    assert torch.equal(model.weight.full_tensor(), before)


@pytest.mark.usefixtures("group")
def test_what_fabric_logs_reaches_the_job() -> None:
    job = Stub()
    fabric, strategy = launched(job)
    fabric.loggers.append(strategy.logger)
    fabric.log("eval_loss", torch.tensor(0.5), step=3)
    fabric.log_dict({"a": 1.0, "b": 2.0})
    assert job.logged == [{"eval_loss": 0.5}, {"a": 1.0, "b": 2.0}]
    refused(lambda: strategy.logger.log_hyperparams({"lr": 1.0}), "log_hyperparams")


class Adopting(Stub):
    """A job that takes models over as a real one does, and notes the types of the gradients that it gets."""

    def adopt(self, model: torch.nn.Module) -> torch.nn.Module:
        from ft_hsdp.train.fsdp.adopted_model import AdoptedModel

        self.types = set()
        self.adopted = AdoptedModel(model, self.ranks, lambda _, flat: self.types.add(flat.dtype))
        return model


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("precision", "held"),
    [("32-true", torch.float32), ("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16)],
)
def test_gradients_of_each_precision_reach_the_job_in_fp32(precision: str, held: torch.dtype) -> None:
    job: Any = Adopting()
    fabric, _ = launched(job, precision=precision)
    model = fabric.setup_module(torch.nn.Linear(4, 4))
    fabric.backward(model(torch.ones(1, 4)).sum())
    assert {p.dtype for p in model.parameters()} == {held}
    assert job.types == {torch.float32}


@pytest.mark.usefixtures("group")
def test_fp16_is_refused() -> None:
    fabric, _ = launched(Adopting(), precision="16-true")
    refused(lambda: fabric.setup_module(torch.nn.Linear(4, 4)), "float16'; allowed: .*float32 or bfloat16")

"""Hugging Face's Trainer: examples/transformers as its page has it, and what is refused.

Run by `make integration-transformers`.
"""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.framework_job import ExampleJob, Page, check_kill, check_weights
from tests.support.refused import refused

pytestmark = pytest.mark.integration
STEPS, SFT_STEPS, VICTIM = 100, 80, 1
EXAMPLES = Path(__file__).parents[2] / "examples" / "transformers"
OWN_LOOP, SFT_LOOP = (f"tests/integrations/transformers_{name}_loop.py" for name in ("own", "sft"))


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")


# The page word for word is two tests, which run at the same time.


@pytest.mark.timeout(600)
def test_plain_and_killed_runs_of_the_page(tmp_path: Path) -> None:
    page = Page("transformers", tmp_path)
    plain, _, killed, _, sft = page.commands()
    assert "'loss'" in page.run(plain)
    page.run(killed)
    check_kill(tmp_path / "runs" / "killed", VICTIM, STEPS)
    check_saved(tmp_path / "runs" / "counting-model")
    check_logged(tmp_path / "runs" / "killed")
    page.run(sft)
    check_kill(tmp_path / "runs" / "sft", VICTIM, SFT_STEPS)
    names = {file.name for file in (tmp_path / "runs" / "sums-adapters").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names


@pytest.mark.timeout(600)
def test_other_runs_of_the_page_have_the_weights_of_our_own_loop(tmp_path: Path) -> None:
    page = Page("transformers", tmp_path)
    _, whole, _, waits, _ = page.commands()
    check_weights(page, whole, waits, OWN_LOOP, STEPS)


def check_saved(folder: Path) -> None:
    """What the job has saved continues sequences that the model was trained on."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    row = torch.arange(3, 35).remainder(64)[None]
    assert model(input_ids=row, labels=row).loss < 1.0


def check_logged(run: Path) -> None:
    """What the Trainer logs is in the job's metrics, once, and its loss is that of the commits."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    logged = [(row["step"], row["logged"]) for row in rows if row.get("logged")]
    assert [step for step, values in logged if "eval_loss" in values] == [50, STEPS]
    by_step = dict(logged)
    losses = [row["loss"] for row in rows if "loss" in row]
    assert by_step[75]["loss"] == pytest.approx(sum(losses[50:75]) / 25, rel=1e-4)


def test_adapters_are_those_of_our_own_loop(tmp_path: Path) -> None:
    script = changed(tmp_path, "sft_train.py", {"max_steps=80,": "max_steps=24,"})
    short: dict[str, Any] = {"config": "sft.yaml", "train__steps": 24}
    kill = {"at_step": 8, "replicas": [VICTIM], "rank": 1}
    with ExampleJob(
        "transformers", tmp_path, "killed", entry=script, chaos=[kill], quorum__min_replicas=2, **short
    ) as job:
        killed = job.finish(24)
        assert len(job.events("ReplicaStarted", replica=VICTIM)) == 2
    with ExampleJob("transformers", tmp_path, "own", entry=SFT_LOOP, **short) as job:
        assert job.finish(24) == killed


def changed(folder: Path, script: str, words: dict[str, str]) -> str:
    """A copy of a script of the example in which some words are others."""
    text = (EXAMPLES / script).read_text()
    for before, after in words.items():
        assert before in text
        text = text.replace(before, after)
    (folder / script).write_text(text)
    return str(folder / script)


def test_several_micro_batches_are_one_step_of_the_trainer(tmp_path: Path) -> None:
    """Accumulation is the job's: the Trainer logs, and steps its scheduler, once for each committed step.

    After the job it evaluates, and the rest of the script runs.
    """
    words = {
        "max_steps=100,": "max_steps=20, gradient_accumulation_steps=2,",
        "save_model()": f"evaluate(), trainer.save_model({str(tmp_path / 'model')!r})",
    }
    script = changed(tmp_path, "train.py", words)
    digests = set()
    for name, entry in (("trainer", script), ("own", OWN_LOOP)):
        with ExampleJob("transformers", tmp_path, name, entry=entry, train__accumulate=2, train__steps=20) as job:
            digests.add(job.finish(20))
            assert {row["units"] for row in job.rows("metrics.jsonl") if "loss" in row} == {8}
    assert len(digests) == 1
    assert (tmp_path / "model" / "config.json").exists()


# What is refused: one rank, with a job that only has a configuration.


def stub(steps: int = 3, ranks: int = 1) -> Any:
    """What a Trainer asks of a job before the first batch."""
    train = SimpleNamespace(steps=steps, accumulate=1, threads=1)
    config = SimpleNamespace(train=train, data=SimpleNamespace(weight="units"))
    return SimpleNamespace(
        config=config,
        ranks=ranks,
        data_rank=0,
        shard=lambda model: model,
        adopt=lambda model: model,
        step=0,
        warm_up=lambda once: once(),
        announced=mock.Mock(return_value=nullcontext()),
    )


def trainer(job: Any, folder: Path, kind: type | None = None, **settings: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

    from ft_hsdp.integrations.transformers import FaultTolerantTrainer

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    settings = {"max_steps": 3, "save_strategy": "no", "use_cpu": True, **settings}
    args = TrainingArguments(output_dir=str(folder), **settings)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes))
    data = [{"input_ids": [1, 2], "labels": [1, 2]}]
    return (kind or FaultTolerantTrainer)(job=job, model=model, args=args, train_dataset=data, eval_dataset=data)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_steps": 4}, r"max_steps: got 4; allowed: 3, train.steps"),
        ({"max_steps": -1, "num_train_epochs": 2}, r"max_steps: got -1; allowed: 3"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps: got 2; allowed: 1, train.accumulate"),
        ({"save_strategy": "steps"}, "save_strategy: got 'steps'; allowed: 'no'.*checkpoint.every"),
        ({"logging_strategy": "epoch"}, "logging_strategy: got 'epoch'"),
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ({"torch_compile": True}, "torch_compile.*block.compile"),
    ],
)
def test_arguments_that_a_job_cannot_follow_are_refused(tmp_path, settings, words) -> None:
    refused(lambda: trainer(stub(), tmp_path, **settings), words)


def test_ranks_that_are_not_those_of_the_job_are_refused(tmp_path: Path) -> None:
    refused(lambda: trainer(stub(ranks=2), tmp_path), "world_size: got 1; allowed: 2")


def test_checkpoints_of_the_trainer_are_refused(tmp_path: Path) -> None:
    made = trainer(stub(), tmp_path)
    refused(lambda: made.train(resume_from_checkpoint=True), "resume_from_checkpoint.*checkpoint.dir")


def test_schedulers_and_optimizers_that_a_commit_cannot_step_are_refused(tmp_path: Path) -> None:
    made = trainer(stub(), tmp_path, lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="steps", eval_steps=1)
    refused(made.create_optimizer, "lr_scheduler_type: got 'ReduceLROnPlateau'")


def test_a_trainer_with_data_of_its_own_is_refused(tmp_path: Path) -> None:
    from transformers import Trainer

    from ft_hsdp.integrations.transformers import FaultTolerantMixin

    class Sampling(Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return None

    class Fast(FaultTolerantMixin, Sampling):
        pass

    class Bare(FaultTolerantMixin):
        pass

    refused(lambda: trainer(stub(), tmp_path, Fast), "got 'Sampling._get_train_sampler'")
    refused(lambda: trainer(stub(), tmp_path, Bare), "no Trainer behind the mixin")


def test_a_step_that_is_left_behind_trains_on_until_one_is_committed(tmp_path, monkeypatch) -> None:
    """The Trainer's numbers are those of the commits, and leave out the steps that this replica was away for."""
    from transformers import Trainer

    job = stub(steps=9)
    made = trainer(job, tmp_path, max_steps=9)
    steps = iter([0, 4, 7])  # held after each optim.step(): none was committed, this one's, one after three away
    batches: Iterator[dict[str, Any]] = iter(
        [{"input_ids": torch.zeros(1, 4, dtype=torch.long)} for _ in range(3)]
    )

    def commit(loss: torch.Tensor) -> None:
        job.step = next(steps)
        job.last = SimpleNamespace(loss=float(job.step), gradient_norm=0.5, lr=0.25)

    made._optim, made._batches = SimpleNamespace(step=commit), batches
    made._initial_global_step = made._globalstep_last_logged = 0
    made.optimizer = SimpleNamespace()
    given: list[Any] = []
    monkeypatch.setattr(Trainer, "training_step", lambda self, model, inputs, items: given.append(inputs))
    assert made.training_step(made.model, next(batches)).item() == 4.0
    assert (made.state.global_step, made._globalstep_last_logged, len(given)) == (3, 3, 2)
    made.state.global_step += 1  # as the Trainer's loop does
    assert made.training_step(made.model, next(batches)).item() == 7.0
    assert (made.state.global_step, made._globalstep_last_logged) == (6, 5)
    assert (made._get_grad_norm(made.model), made._get_learning_rate()) == (0.5, 0.25)


def test_the_warm_up_has_the_loss_of_the_trainer(tmp_path: Path) -> None:
    from ft_hsdp.integrations.transformers import FaultTolerantTrainer

    class Weighing(FaultTolerantTrainer):
        def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **more: Any) -> Any:
            return inputs.pop("weight") * super().compute_loss(model, inputs, *args, **more)

    job = stub()
    made = trainer(job, tmp_path, Weighing)
    row = torch.ones(1, 4, dtype=torch.long)
    (3 * made.model(input_ids=row, labels=row).loss).backward()
    expected = made.model.lm_head.weight.grad.clone()
    made.model.zero_grad()
    batch = {"input_ids": row, "labels": row, "weight": torch.tensor(3.0)}
    loader = SimpleNamespace(batch=lambda shard, index, rank: batch, steps_per_epoch=1)
    job.loader = lambda *args, **more: loader
    made.get_train_dataloader()
    made.get_batch_samples(iter([batch]), 1, torch.device("cpu"))
    torch.testing.assert_close(made.model.lm_head.weight.grad, expected)


def test_an_epoch_of_less_than_a_step_of_all_replicas_is_refused(tmp_path: Path) -> None:
    job = stub()
    job.loader = lambda *args, **more: SimpleNamespace(steps_per_epoch=0)
    refused(trainer(job, tmp_path).get_train_dataloader, "less than one step")


def test_what_is_saved_appears_as_a_whole(tmp_path: Path) -> None:
    job = stub()
    made = trainer(job, tmp_path / "out")
    job.full_state_dict = made.model.state_dict
    made.save_model()
    made.save_model()
    job.announced.assert_called_with("saving")
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert {"config.json", "model.safetensors"} <= names
    assert not [name for name in names if name.startswith(".saving")]

"""torchtitan: examples/torchtitan as its page has it, attention on CPUs, and what is refused.

Run by `make integration-torchtitan`.
"""

import gc
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.support.framework_job import ExampleJob, Page, check_kill, check_weights
from tests.support.refused import refused

pytestmark = [
    pytest.mark.integration,
    # Packages that torchtitan imports use what they say is deprecated.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]
STEPS, AT, VICTIM = 60, 20, 1
KILL = {"at_step": AT, "replicas": [VICTIM], "rank": 1}
CONFIG = ["--module", "train", "--config", "llama3_tiny"]
OWN_LOOP = "tests/integrations/torchtitan_own_loop.py"
ROWS = ["--module", "tests.integrations.torchtitan_rows", "--config", "llama3_rows"]


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that answers for a GPU; it is imported before torchtitan."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples" / "torchtitan"))
    import on_cpu  # type: ignore[import-not-found]

    return on_cpu


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float, float]]:
    """Step, loss and norm that the first command of the page prints, on both ranks."""
    page = Page("torchtitan", tmp_path_factory.mktemp("plain"))
    return printed(page.run(page.commands()[0]))


def printed(log: str) -> list[tuple[int, float, float]]:
    found = re.findall(r"step: +(\d+) +loss: +([\d.]+) +grad_norm: +([\d.]+)", log)
    return [(int(step), float(loss), float(norm)) for step, loss, norm in found]


# The page word for word is two tests, which run at the same time.


def test_plain_and_killed_runs_of_the_page(plain: list[tuple[int, float, float]], tmp_path: Path) -> None:
    page = Page("torchtitan", tmp_path)
    _, _, killed, _ = page.commands()
    assert plain[-1][1] < 0.5 * plain[0][1]
    page.run(killed)
    check_kill(tmp_path / "runs" / "killed", VICTIM, STEPS, units=2)


@pytest.mark.timeout(600)
def test_other_runs_of_the_page_have_the_weights_of_our_own_loop(tmp_path: Path) -> None:
    page = Page("torchtitan", tmp_path)
    _, whole, _, waits = page.commands()
    check_weights(page, whole, waits, OWN_LOOP, STEPS, args=[])
    lines = (tmp_path / "runs" / "waits" / "metrics.jsonl").read_text().splitlines()
    logged = [row for row in map(json.loads, lines) if "logged" in row]
    assert [row["step"] for row in logged if "validation_metrics/loss" in row["logged"]] == [1, 30, 60]
    assert [row["step"] for row in logged if "mfu_pct" in row["logged"]] == [1, 10, 20, 30, 40, 50, 60]


def test_rows_with_an_index_count_once(tmp_path: Path) -> None:
    """The samples of a lost replica are trained by the other one; rows differ in how many tokens are valid."""
    dealt: dict[str, Any] = {"data__assignment": "global", "args": ROWS}
    refilled: dict[str, Any] = {"quorum__batch": "constant", "quorum__refill": "same_step", "chaos": [KILL]}
    with ExampleJob("torchtitan", tmp_path, "refilled", **dealt, **refilled) as job:
        job.finish(STEPS)
    check_kill(tmp_path / "runs" / "refilled", VICTIM, STEPS)
    with ExampleJob("torchtitan", tmp_path, "waits", **dealt, quorum__min_replicas=2, chaos=[KILL]) as job:
        waits = job.finish(STEPS)
    with ExampleJob("torchtitan", tmp_path, "own", **(dealt | {"args": ["rows"]}), entry=OWN_LOOP) as job:
        assert job.finish(STEPS) == waits


def test_one_replica_trains_as_plain_torchtitan(plain: list[tuple[int, float, float]], tmp_path: Path) -> None:
    """The same weights, batches, losses and norms, within what a sum in another order changes."""
    with ExampleJob("torchtitan", tmp_path, "one", replicas=1) as job:
        job.finish(STEPS)
    ours = printed((tmp_path / "runs" / "one" / "replicas" / "0" / "rank0.log").read_text())
    assert [step for step, _, _ in ours] == [1, 10, 20, 30, 40, 50, 60]
    for (step, loss, norm), mine in zip(sorted(set(plain)), ours, strict=True):
        assert mine == (step, pytest.approx(loss, rel=1e-3), pytest.approx(norm, rel=1e-2))


PARALLEL = "--parallelism.tensor_parallel_degree=2"


def test_a_tensor_parallel_replica_trains_as_plain_torchtitan(tmp_path: Path) -> None:
    """Four ranks in both, of which two train a micro-batch together."""
    few = [PARALLEL, "--training.steps=12", "--metrics.log_freq=1"]
    page = Page("torchtitan", tmp_path)
    command = page.commands()[0].replace("--nproc-per-node=2", "--nproc-per-node=4")
    wanted = sorted(set(printed(page.run(" ".join([command, *few])))))
    shape: dict[str, Any] = {"replicas": 1, "ranks_per_replica": 4, "ranks_per_unit": 2, "train__steps": 12}
    with ExampleJob("torchtitan", tmp_path, "one", args=[*CONFIG, *few], **shape) as job:
        job.finish(12)
    ours = printed((tmp_path / "runs" / "one" / "replicas" / "0" / "rank0.log").read_text())
    assert [step for step, _, _ in wanted] == [*range(1, 13)]
    for (step, loss, norm), mine in zip(wanted, ours, strict=True):
        assert mine == (step, pytest.approx(loss, rel=1e-3), pytest.approx(norm, rel=1e-3))


def test_a_kill_of_a_tensor_parallel_replica_leaves_no_trace(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"ranks_per_unit": 2, "quorum__min_replicas": 2, "args": [*CONFIG, PARALLEL]}
    with ExampleJob("torchtitan", tmp_path, "whole", **shape) as job:
        whole = job.finish(STEPS)
    with ExampleJob("torchtitan", tmp_path, "killed", chaos=[KILL], **shape) as job:
        assert job.finish(STEPS) == whole
        assert len(job.events("ReplicaStarted", replica=VICTIM)) == 2


def drawn(heads: int = 4, kv_heads: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values [2, heads, 48, 16]."""
    torch.manual_seed(0)
    return tuple(torch.randn(2, h, 48, 16, requires_grad=True) for h in (heads, kv_heads, kv_heads))  # type: ignore[return-value]


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_on_cpus_is_that_of_torch(on_cpu: Any, kv_heads: int) -> None:
    from torch.nn.attention.flex_attention import create_block_mask
    from torchtitan.models.common.attention import get_causal_mask_mod

    causal = create_block_mask(get_causal_mask_mod(), 2, None, 48, 48, device="cpu")
    q, k, v = drawn(kv_heads=kv_heads)
    wanted = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    gradients = torch.autograd.grad(wanted.square().sum(), (q, k, v))
    out, _ = on_cpu.attend(q, k, v, block_mask=causal, scale=None, enable_gqa=True)
    torch.testing.assert_close(out, wanted)
    for mine, theirs in zip(torch.autograd.grad(out.square().sum(), (q, k, v)), gradients, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_attention_on_cpus_keeps_documents_apart_as_flex_attention(on_cpu: Any) -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    starts = torch.zeros(2, 48, dtype=torch.int64)
    starts[0, 20], starts[1, 7], starts[1, 30] = 1, 1, 1
    document = starts.cumsum(dim=1)

    def same(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (document[b, q] == document[b, k])

    mask = create_block_mask(same, 2, None, 48, 48, device="cpu")
    q, k, v = (t.detach() for t in drawn())
    out, _ = on_cpu.attend(q, k, v, block_mask=mask, scale=0.5, enable_gqa=False)
    torch.testing.assert_close(out, flex_attention(q, k, v, block_mask=mask, scale=0.5))


# What is refused, and what is given to the job: one rank, without a job.


class Stub(SimpleNamespace):
    """What a trainer asks of a job, for a job of one rank that commits a step for every second batch."""

    def __init__(self, steps: int = 60, **data: Any) -> None:
        train = SimpleNamespace(steps=steps, accumulate=2, seed=7)
        data_section = SimpleNamespace(weight="tokens", **data)
        config = SimpleNamespace(train=train, replicas=2, ranks_per_unit=1, data=data_section)
        super().__init__(config=config, ranks=1, data_rank=0, data_ranks=1, step=0, last=None)
        self.weights: list[int] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.logged_names: set[str] = set()
        self.left = False

    def adopt(self, model: torch.nn.Module) -> None:
        self.model = model

    def optimizer(self, optimizers: list[Any], schedulers: list[Any]) -> Any:
        self.given = optimizers, schedulers
        self.wrapped = SimpleNamespace(step=self.committed)
        return self.wrapped

    def committed(self, loss: torch.Tensor) -> None:
        self.micro = getattr(self, "micro", 0) + 1
        if self.micro % 2 == 0:
            self.step += 1
            for scheduler in self.given[1]:
                scheduler.step()
            self.last = SimpleNamespace(loss=float(loss), gradient_norm=1.0)

    def warm_up(self, once: Callable[[], None]) -> None:
        once()
        self.weights.clear()

    def weigh(self, tokens: int) -> None:
        self.weights.append(tokens)

    def stream(self, source: Callable[[int, int], Any]) -> Any:
        return source(1, 4)

    def batches(self, source: Any) -> Iterator[Any]:
        for batch in source:
            if self.step >= 2:
                return
            yield batch

    def log(self, values: dict[str, float]) -> None:
        self.logged.append((self.step, values))


@pytest.fixture
def mended(group: None) -> Iterator[None]:
    """The group, and what torchtitan disables is enabled again."""
    yield
    torch.autograd.set_multithreading_enabled(True)
    gc.enable()


@pytest.fixture
def config(on_cpu: Any) -> Any:
    """The example's configuration, without validation."""
    import train  # type: ignore[import-not-found]

    made = train.llama3_tiny()
    made.validator.enable = False
    return made


def built(config: Any, monkeypatch: pytest.MonkeyPatch, job: Stub) -> Any:
    from ft_hsdp.integrations import torchtitan

    monkeypatch.setattr(torchtitan, "join", lambda: job)
    return config.build()


@pytest.mark.usefixtures("mended")
@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("training.steps", 61, "training.steps.*train.steps, which is 60"),
        ("training.global_batch_size", 8, "global_batch_size.*16"),
        ("training.disable_cuda_graphs", False, "disable_cuda_graphs.*True"),
        ("parallelism.pipeline_parallel_degree", 2, "pipeline_parallel_degree"),
        ("parallelism.tensor_parallel_degree", 2, "tensor_parallel_degree.*ranks_per_unit, which is 1"),
        ("parallelism.context_parallel_degree", 2, "context_parallel_degree.*tensor_parallel_degree"),
        ("parallelism.expert_parallel_degree", 2, "expert_parallel_degree.*docs/library.md"),
        ("checkpoint.enable", True, "checkpoint.enable.*checkpoint.dir"),
        ("metrics.enable_tensorboard", True, "docs/metrics.md"),
        ("metrics.enable_wandb", True, "docs/metrics.md"),
        ("profiler.enable_profiling", True, "enable_profiling"),
        ("profiler.enable_memory_snapshot", True, "enable_memory_snapshot"),
        ("optimizer.implementation", "fused_opt_states_bf16", "optimizer.implementation.*fused"),
    ],
)
def test_settings_that_a_job_cannot_have_are_refused(config, monkeypatch, key, value, words) -> None:
    section, name = key.split(".")
    setattr(getattr(config, section), name, value)
    refused(lambda: built(config, monkeypatch, Stub()), words)


@pytest.mark.usefixtures("mended")
def test_a_loss_that_runs_backward_and_means_over_units_are_refused(config, monkeypatch) -> None:
    from torchtitan.components.loss import ChunkedLossWrapper

    job = Stub()
    job.config.data.weight = "units"
    refused(lambda: built(config, monkeypatch, job), "data.weight.*tokens")
    config.loss = ChunkedLossWrapper.Config()
    refused(lambda: built(config, monkeypatch, Stub()), "ChunkedLossWrapper")


@pytest.mark.usefixtures("mended")
def test_hooks_of_the_optimizers_are_refused(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config.model_spec.post_optimizer_build_fn = lambda optimizers, *_: optimizers.register_step_pre_hook(print)
    refused(lambda: built(config, monkeypatch, Stub()), "a hook of step")


@pytest.mark.usefixtures("mended")
def test_what_a_trainer_gives_to_the_job(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config.training.global_batch_size = 16
    config.debug.seed = None
    config.metrics.log_freq = 2
    job = Stub()
    trainer = built(config, monkeypatch, job)
    assert config.debug.seed == 7
    assert trainer.gradient_accumulation_steps == 2
    assert job.model is trainer.model_parts[0]
    assert job.given == (trainer.optimizers.optimizers, trainer.lr_schedulers.schedulers)
    assert job.wrapped.clip == 1.0
    trainer.train()
    trainer.close()
    assert job.weights == [4 * 64] * 4
    assert trainer.step == 2
    assert [step for step, _ in job.logged] == [1, 2]
    assert job.logged[0][1]["lr/AdamW"] == pytest.approx(1e-4), "the first of 10 steps that warm up"
    assert {"throughput_tps", "mfu_pct"} <= job.logged[0][1].keys()
    assert not any("loss" in name or name == "grad_norm" for name in job.logged[0][1])


@pytest.mark.usefixtures("mended")
def test_the_state_of_a_stream_needs_no_pickle(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from ft_hsdp.train.data.stream import decode_state, encode_state

    trainer = built(config, monkeypatch, Stub())
    stream = trainer._stream(1, 4)
    batches = iter(stream)
    for _ in range(3):
        next(batches)
    state = decode_state(encode_state(stream.state_dict()))
    assert not any(isinstance(value, bytes) for value in state.values())
    again = trainer._stream(1, 4)
    again.load_state_dict(state)
    (mine, labels), (theirs, wanted) = next(iter(again)), next(batches)
    assert torch.equal(labels, wanted)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.usefixtures("mended")
def test_weights_to_begin_with(config: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those of a checkpoint of torchtitan are read; its state of a later step is refused."""
    from torchtitan.trainer import Trainer

    config.dump_folder = str(tmp_path / "plain")
    config.checkpoint.enable, config.checkpoint.interval = True, 5
    plain = Trainer(config)
    plain.step = 5
    plain.checkpointer.save(5, last_step=False)
    plain.close()
    config.debug.seed = 3
    config.checkpoint.load_only = True
    refused(lambda: built(config, monkeypatch, Stub()), "a state of step 5.*initial_load_path")
    config.dump_folder = str(tmp_path / "ours")
    config.checkpoint.initial_load_path = str(tmp_path / "plain" / "checkpoint" / "step-5")
    trainer = built(config, monkeypatch, Stub())
    trainer.close()
    wanted, found = (each.model_parts[0].state_dict() for each in (plain, trainer))
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())

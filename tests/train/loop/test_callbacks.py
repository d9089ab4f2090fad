"""What the user's loop hears of committed steps, fetched states and the end, and how it tells its loss."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from ft_hsdp.config import parse
from ft_hsdp.core.commit import CommitRecord, Contribution
from ft_hsdp.core.effects import Exit
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import EXIT_CONFIG, EXIT_RETRYABLE, ConfigError
from ft_hsdp.train.identity import RankIdentity
from ft_hsdp.train.job import Job, Optimizer
from ft_hsdp.train.loop.callbacks import CallbackFailed, CommittedStep
from ft_hsdp.train.orders import ApplyOrder, LoadOrder
from ft_hsdp.train.step_driver import Joined, StepDriver
from tests.support.state.odd_model import batch
from tests.train.test_job import made, shard
from tests.train.test_quota import Loop

START = StateId(0, 0, "0" * 32)


class Stepping:
    """A rank of a job of one rank, at step 0, to which commits are given."""

    def __init__(self, job: Job) -> None:
        self.model = shard(job)
        self.optim: Optimizer = job.optimizer(torch.optim.SGD(list(job._adopted.params.values()), lr=0.25))
        job._identity = RankIdentity(1, "1-x-0", (), None, 0.0)
        assert job._driver is not None
        self.job = job
        self.driver: StepDriver = job._driver
        self.driver._joined = Joined(mock.Mock(), mock.Mock(), None, False)
        self.runtime: Any = self.driver._joined.runtime
        job._live_state.state = START

    def record(self, loss: float = 2.0) -> CommitRecord:
        live = self.job._live_state
        assert live.state is not None
        rows = tuple(Contribution(r, 1, r, live.ledger.cursors[r], loss + r) for r in (0, 1))
        step, prev = live.state.step + 1, live.state.lineage
        return CommitRecord(1, 0, step, prev, (0, 1), 2, rows, "d", norm=0.5, wanted=2)

    def commit(self) -> None:
        reduced = [torch.ones(n) for n in self.job._adopted.sizes]
        self.driver.carry_out(ApplyOrder(self.record(), reduced))


@pytest.fixture
def stepping(mesh: DeviceMesh, tmp_path: Path) -> Iterator[Stepping]:
    with made(mesh, tmp_path, parse({"replicas": 2, "ranks_per_replica": 1})) as job:
        yield Stepping(job)


def test_the_step_is_zero_before_the_first_and_then_that_of_the_last_commit(stepping: Stepping) -> None:
    job = stepping.job
    assert (job.step, job.last) == (0, None)
    stepping.commit()
    stepping.commit()
    assert job.step == 2
    assert job.last == CommittedStep(2, (0, 1), 2.5, 0.5, 0.25, 2, True)


def test_a_job_without_an_optimizer_is_at_step_zero(mesh: DeviceMesh, tmp_path: Path) -> None:
    with made(mesh, tmp_path, parse({"replicas": 2, "ranks_per_replica": 1})) as job:
        assert (job.step, job.last) == (0, None)


def test_callbacks_see_every_step_in_order_with_new_weights_and_before_the_state_has_its_name(
    stepping: Stepping,
) -> None:
    job, live = stepping.job, stepping.job._live_state
    seen: list[tuple[object, ...]] = []
    weight = next(iter(job._adopted.params.values()))
    before = weight.full_tensor().clone()

    @job.on_commit
    def first(step: CommittedStep) -> None:
        moved = not torch.equal(weight.full_tensor(), before)
        assert live.state is not None
        seen.append((step.step, job.step, live.state.step, moved))

    assert job.on_commit(lambda step: seen.append((step.step, "second"))) is not None
    stepping.commit()
    stepping.commit()
    assert callable(first)
    assert seen == [(1, 1, 0, True), (1, "second"), (2, 2, 1, True), (2, "second")]


def test_an_error_in_a_callback_ends_the_rank_with_its_traceback(
    stepping: Stepping, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(step: CommittedStep) -> None:
        raise ValueError("no such average")

    stepping.job.on_commit(fails)
    with pytest.raises(CallbackFailed):
        stepping.commit()
    reason, code = stepping.runtime.end.call_args.args
    assert reason.endswith("fails) failed: ValueError: no such average")
    assert reason.startswith("job.on_commit(")
    assert code == EXIT_RETRYABLE
    assert 'raise ValueError("no such average")' in capsys.readouterr().err
    assert stepping.job._live_state.state == START, "a step that is half applied has no name"


def test_bad_input_in_a_callback_is_not_tried_again(stepping: Stepping) -> None:
    def fails(step: CommittedStep) -> None:
        raise ConfigError("ema", step.step, "less")

    stepping.job.on_commit(fails)
    with pytest.raises(CallbackFailed):
        stepping.commit()
    assert stepping.runtime.end.call_args.args[1] == EXIT_CONFIG


def test_a_state_that_is_loaded_is_told_and_has_no_step_before_it(stepping: Stepping) -> None:
    seen: list[int] = []
    stepping.job.on_rejoin(seen.append)
    stepping.commit()
    live = stepping.job._live_state
    assert live.state is not None
    packed = np.empty(live.layout.nbytes, dtype=np.uint8)
    manifest = live.pack(live.state, packed)
    assert manifest is not None
    stepping.commit()
    stepping.driver.carry_out(LoadOrder(manifest, packed))
    assert (seen, stepping.job.step, stepping.job.last) == ([1], 1, None)
    stepping.commit()
    assert stepping.job.last is not None
    assert stepping.job.last.step == 2, "the next step is applied here"


def test_a_rank_that_begins_with_a_state_is_told(stepping: Stepping) -> None:
    seen: list[int] = []
    stepping.job.on_rejoin(seen.append)
    here = stepping.driver.here
    stepping.driver.begin(here)
    assert seen == [], "the initial state replaces nothing"
    stepping.job._live_state.state = StateId(1, 7, "1" * 32)
    stepping.driver.begin(here)
    assert seen == [7]


def test_the_end_is_told_before_the_loop_ends(stepping: Stepping, monkeypatch: pytest.MonkeyPatch) -> None:
    job, seen = stepping.job, []
    job.on_leave(seen.append)
    monkeypatch.setattr(job, "_join", lambda *_: None)
    monkeypatch.setattr(job, "_part", lambda: seen.append("closed"))
    job._mailbox.put(Exit(0, "the job has its final state"))
    assert list(job.batches(mock.Mock())) == []
    assert seen == ["the job has its final state", "closed"]


@pytest.mark.parametrize("kind", ["on_commit", "on_rejoin", "on_leave"])
def test_callbacks_are_functions_and_come_before_the_first_batch(stepping: Stepping, kind: str) -> None:
    register = getattr(stepping.job, kind)
    with pytest.raises(ConfigError, match=rf"job.{kind}: got 3; allowed: a function"):
        register(3)
    stepping.job._callbacks.fix()
    with pytest.raises(ConfigError, match="a call before the first batch"):
        register(lambda _: None)


# The loss.


@pytest.fixture
def loop(mesh: DeviceMesh, tmp_path: Path) -> Iterator[Loop]:
    with made(mesh, tmp_path, parse({"replicas": 2, "ranks_per_replica": 1})) as job:
        yield Loop(job)


def told(loop: Loop) -> list[float]:
    """The loss in each bucket that the reducer got, by bucket."""
    calls = loop.driver.here.runtime.reducer.ready.call_args_list  # type: ignore[attr-defined]
    return [call.args[2][0].loss for call in sorted(calls, key=lambda call: call.args[0])]


def trained(loop: Loop) -> None:
    """Train one micro-batch, whose forward returns no loss."""
    loop.begin((0, 1))
    assert loop.micro_batch()
    assert loop.driver.plan is not None
    (loop.job._adopted.model(batch(0)) * 1.0).backward()
    loop.driver.plan.trained[-1].loss = float("nan")


@pytest.mark.parametrize(
    "loss", [1.5, torch.tensor(1.5, requires_grad=True), torch.tensor([1.5], dtype=torch.bfloat16)]
)
def test_the_loss_may_be_given_after_backward(loop: Loop, loss: Any) -> None:
    trained(loop)
    buckets = len(loop.job._adopted.sizes)
    assert len(told(loop)) == buckets - 1, "all but the last bucket went off in backward"
    loop.orders.put(Exit(0, "enough"))
    Optimizer(loop.driver).step(loss=loss)
    assert len(told(loop)) == buckets
    assert told(loop)[-1] == 1.5, "the last bucket tells the loss of the step"


def test_a_loop_that_asks_for_the_next_batch_without_a_step_holds_nobody_up(loop: Loop) -> None:
    trained(loop)
    assert not loop.micro_batch()
    assert len(told(loop)) == len(loop.job._adopted.sizes)


@pytest.mark.parametrize("loss", [torch.ones(2), torch.ones(0), "1.5", True, torch.tensor(1j), [1.0]])
def test_a_loss_that_is_no_scalar_is_refused(loop: Loop, loss: Any) -> None:
    trained(loop)
    with pytest.raises(ConfigError, match=r"^optim.step\(loss\): got .*; allowed: a number, or a tensor of one"):
        Optimizer(loop.driver).step(loss=loss)


@pytest.mark.parametrize(
    "form", [lambda loss: SimpleNamespace(loss=loss), lambda loss: {"logits": 1, "loss": loss.bfloat16()}]
)
def test_the_loss_is_found_in_what_a_hugging_face_model_returns(loop: Loop, form: Any) -> None:
    loop.begin((0, 1))
    assert loop.micro_batch()
    output = form(torch.tensor(2.5, requires_grad=True))
    assert loop.job._returned(torch.nn.Identity(), (), output) is output
    assert loop.driver.current is not None
    assert loop.driver.current.loss == 2.5

"""What the user's loop hears of committed steps, fetched states and the end, and how it tells its loss."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ft_hsdp.config import parse
from ft_hsdp.core.effects import Exit
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import EXIT_CONFIG, EXIT_RETRYABLE, ConfigError
from ft_hsdp.train.loop.callbacks import CallbackFailed, Callbacks, CommittedStep
from ft_hsdp.train.orders import ApplyOrder, LoadOrder
from ft_hsdp.train.state.packing import local
from tests.support.refused import refused
from tests.support.state.odd_model import batch
from tests.support.train.one_rank import START, STEP, OneRank
from tests.train.test_job import made

CONFIG = parse({"replicas": 2, "ranks_per_replica": 1})


@pytest.fixture
def one(mesh: DeviceMesh) -> OneRank:
    return OneRank(mesh, CONFIG, replica=1)


def test_callbacks_see_every_step_in_order_with_new_weights_and_before_the_state_has_its_name(one) -> None:
    driver, live = one.driver, one.live
    seen: list[tuple[object, ...]] = []
    weight = next(iter(one.params.values()))
    before = weight.full_tensor().clone()

    def first(step: CommittedStep) -> None:
        moved = not torch.equal(weight.full_tensor(), before)
        assert live.state is not None
        seen.append((step.step, driver.step, live.state.step, moved))

    assert one.callbacks.add("on_commit", first) is first
    one.callbacks.add("on_commit", lambda step: seen.append((step.step, "second")))
    assert (driver.step, driver.last) == (0, None)
    one.commit()
    one.commit()
    assert seen == [(1, 1, 0, True), (1, "second"), (2, 2, 1, True), (2, "second")]
    assert driver.last == CommittedStep(2, (0, 1), 2.5, 0.5, 0.25, 2, True, 1)


@pytest.mark.parametrize(
    ("error", "code"),
    [(ValueError("no such average"), EXIT_RETRYABLE), (ConfigError("ema", 1, "less"), EXIT_CONFIG)],
)
def test_an_error_in_a_callback_ends_the_rank_with_its_traceback(one, capsys, error, code) -> None:
    """Bad input is not tried again."""

    def fails(step: CommittedStep) -> None:
        raise error

    one.callbacks.add("on_commit", fails)
    with pytest.raises(CallbackFailed):
        one.commit()
    reason, ended = one.runtime.end.call_args.args
    assert reason.startswith("job.on_commit(")
    assert (str(error) in reason, ended) == (True, code)
    assert "raise error" in capsys.readouterr().err
    assert one.live.state is None, "a step that is half applied has no name"


def test_an_exit_in_a_callback_is_one_of_the_loop_once_the_step_is_applied(one: OneRank) -> None:
    seen: list[int] = []
    one.callbacks.add("on_commit", lambda _: sys.exit(0))
    one.callbacks.add("on_commit", lambda step: seen.append(step.step))
    one.live.state = StateId(1, STEP - 1, START.lineage)
    order = ApplyOrder(one.record(), [torch.ones(n) for n in one.adopted.sizes])
    trained(one)
    one.orders.put(order)
    with pytest.raises(SystemExit):
        one.optim.step()
    assert (one.live.state, seen, one.driver.whole) == (order.record.state_id, [STEP], True)
    one.callbacks.add("on_leave", lambda _: sys.exit(0))
    with pytest.raises(SystemExit):
        one.callbacks.call("on_leave", "it is over")


def test_an_exit_in_a_callback_outside_a_step_ends_the_batches(one: OneRank, tmp_path: Path) -> None:
    job, driver = made(tmp_path, CONFIG), one.driver
    one.callbacks.add("on_rejoin", lambda _: sys.exit(0))
    one.live.state = StateId(1, 7, "1" * 32)
    parts: dict[str, Any] = {"_driver": driver, "_groups": driver.groups, "_adopted": one.adopted}
    parts |= {"_callbacks": one.callbacks, "_live_state": one.live, "_mailbox": one.orders}
    parts |= {"_open_reader": mock.Mock(), "_join": lambda driver, reader: driver.begin(one.joined)}
    with mock.patch.multiple(job, create=True, **parts), pytest.raises(SystemExit):
        next(job.batches(one.source))


@pytest.mark.parametrize("end", [SystemExit(0), KeyboardInterrupt(), RuntimeError("out of memory")])
def test_a_script_that_ends_within_a_step_has_no_last_state(one: OneRank, tmp_path: Path, end) -> None:
    one.sgd.register_step_post_hook(mock.Mock(side_effect=end))
    job, parts = made(tmp_path, CONFIG), {"_runtime": one.runtime, "_driver": one.driver, "_mailbox": one.orders}
    with pytest.raises(type(end)):
        one.commit()
    with mock.patch.multiple(job, **parts), pytest.raises(RuntimeError):
        job.finish()
    one.runtime.leave.assert_not_called()


def test_a_state_that_is_loaded_is_told_and_has_no_step_before_it(one: OneRank) -> None:
    seen: list[int] = []
    one.callbacks.add("on_rejoin", seen.append)
    one.commit()
    live = one.live
    assert live.state is not None
    packed = np.empty(live.layout.nbytes, dtype=np.uint8)
    manifest = live.pack(live.state, packed)
    assert manifest is not None
    one.commit()
    one.driver.carry_out(LoadOrder(manifest, packed))
    assert (seen, one.driver.step, one.driver.last) == ([1], 1, None)
    one.commit()
    assert one.driver.last is not None
    assert one.driver.last.step == 2


def test_no_weights_outlive_a_forward_without_backward(one: OneRank) -> None:
    """FSDP2 keeps the whole parameters of the root after it; a loop may also put other weights in for it."""
    seen: list[bool] = []
    params = [local(p) for p in one.params.values()]

    def look(_: object = None) -> None:
        seen.append(all(isinstance(p, DTensor) for p in one.model.parameters()))

    @torch.no_grad()
    def forward(_: object = None) -> None:
        alone = type(one.model)()
        alone.load_state_dict({name: p.full_tensor() for name, p in one.params.items()})
        seen.append(float(one.model(batch(0))) == float(alone(batch(0))))

    for kind in ("on_commit", "on_rejoin"):
        for callback in (forward, look, forward):
            one.callbacks.add(kind, callback)
    one.commit()
    state, packed = one.live.state, np.empty(one.live.layout.nbytes, dtype=np.uint8)
    assert state is not None
    manifest = one.live.pack(state, packed)
    assert manifest is not None
    forward()
    one.commit()
    look()
    forward()
    one.driver.carry_out(LoadOrder(manifest, packed))
    look()
    for param in params:
        param.mul_(0.125)
    forward()
    for param in params:
        param.mul_(8)
    one.feed((0, 1))
    assert one.micro_batch()
    forward()
    assert seen == [True] * len(seen)
    assert len(seen) == 3 * 3 + 6


def test_a_rank_that_begins_with_a_state_is_told(one: OneRank) -> None:
    seen: list[int] = []
    one.callbacks.add("on_rejoin", seen.append)
    one.driver.begin(one.joined)
    assert seen == [], "the initial state replaces nothing"
    one.live.state = StateId(1, 7, "1" * 32)
    one.driver.begin(one.joined)
    assert seen == [7]


@pytest.mark.parametrize("kind", ["on_commit", "on_rejoin", "on_leave"])
def test_callbacks_are_functions_and_come_before_the_first_batch(kind: str) -> None:
    callbacks: Any = Callbacks()
    refused(lambda: callbacks.add(kind, 3), "got 3;", f"job.{kind}")
    callbacks.fix()
    refused(lambda: callbacks.add(kind, lambda _: None), f"job.{kind}")


def told(one: OneRank) -> list[float]:
    """The loss in each bucket that the reducer got, by bucket."""
    calls = one.runtime.reducer.ready.call_args_list
    return [call.args[3]() for call in sorted(calls, key=lambda call: call.args[0])]


def trained(one: OneRank) -> None:
    """Train one micro-batch, whose forward returns no loss."""
    one.feed((0, 1))
    assert one.micro_batch()
    (one.model(batch(0)) * 1.0).backward()
    assert one.driver.current is not None
    one.driver.current.loss = float("nan")


@pytest.mark.parametrize(
    "loss", [1.5, torch.tensor(1.5, requires_grad=True), torch.tensor([1.5], dtype=torch.bfloat16)]
)
def test_the_loss_may_be_given_after_backward(one: OneRank, loss: Any) -> None:
    trained(one)
    buckets = len(one.adopted.sizes)
    assert len(told(one)) == buckets - 1, "the last bucket waits for the loss"
    one.orders.put(Exit(0, "enough"))
    one.optim.step(loss=loss)
    assert len(told(one)) == buckets
    assert told(one)[-1] == 1.5


def test_a_loop_that_asks_for_the_next_batch_without_a_step_is_told_so(one: OneRank) -> None:
    """Not one that has left, nor one that the job ends."""
    trained(one)
    refused(one.micro_batch, "no optim.step after batch", key="job.batches")
    trained(one)
    one.batches.close()  # type: ignore[attr-defined]
    trained(one)
    one.orders.put(Exit(0, "enough"))
    assert not one.optim.step()
    assert not one.micro_batch()


@pytest.mark.parametrize("loss", [torch.ones(2), torch.ones(0), "1.5", True, torch.tensor(1j), [1.0]])
def test_a_loss_that_is_no_scalar_is_refused(one: OneRank, loss: Any) -> None:
    trained(one)
    refused(lambda: one.optim.step(loss=loss), key="optim.step(loss)")


@pytest.mark.parametrize(
    "form",
    [
        lambda loss: loss,
        lambda loss: {"loss": loss, "logits": torch.ones(3)},
        lambda loss: SimpleNamespace(loss=loss),
        lambda loss: {"logits": 1, "loss": loss.bfloat16()},
    ],
)
def test_the_loss_is_what_the_model_returns_or_calls_so(one: OneRank, form: Any) -> None:
    one.feed((0, 1))
    assert one.micro_batch()
    output = form(torch.tensor(2.5, requires_grad=True))
    assert one.driver.returned(torch.nn.Identity(), (), output) is output, "where units count, nothing is weighed"
    assert one.driver.current is not None
    assert one.driver.current.loss == 2.5

"""The evaluation of committed states: which, to what loss, and that training does not notice it."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ft_hsdp.config import parse
from ft_hsdp.core.ledger import Ledger
from ft_hsdp.train.data.step_plan import StepPlan
from ft_hsdp.train.loop.callbacks import CallbackFailed
from ft_hsdp.train.loop.evaluation import Evaluation
from ft_hsdp.train.trainer import eval_dataset
from tests.support.refused import refused
from tests.support.state.odd_model import batch
from tests.support.train.one_rank import OneRank
from tests.train.test_job import made, shard

BATCHES = 5
EVAL = {"every": 3, "batches": BATCHES}
CONFIG = parse({"replicas": 2, "ranks_per_replica": 1, "entry": "o.py", "train": {"steps": 8}, "eval": EVAL})


class Numbered:
    def batch(self, shard: int, index: int, rank: int, micro: int = 0) -> Tensor:
        assert (shard, rank, micro) == (0, 0, 0)
        return batch(100 + index)


def of(one: OneRank, loss_of: Any = None, rank: int = 0, ranks: int = 1, pause: Any = None) -> Evaluation[Any]:
    given, pause = Numbered(), pause or mock.MagicMock()
    return Evaluation(CONFIG, loss_of or one.model, given, one.model, rank, ranks, torch.device("cpu"), pause)


@pytest.fixture
def one(mesh: DeviceMesh) -> OneRank:
    return OneRank(mesh, CONFIG, replica=1)


def expected(one: OneRank) -> float:
    """The mean loss of the weights that the rank's shards have now."""
    plain = type(one.model)()
    plain.load_state_dict({name: p.full_tensor() for name, p in one.params.items()})
    with torch.no_grad():
        return math.fsum(float(plain(batch(100 + i))) for i in range(BATCHES)) / BATCHES


def test_every_third_step_and_the_last_one_are_evaluated_with_the_weights_of_that_step(one: OneRank) -> None:
    evaluation, found = of(one), []
    for step in range(1, 9):
        one.commit()
        found.append(evaluation.at(step))
        assert found[-1] in (None, expected(one))
    assert [step for step, loss in enumerate(found, 1) if loss is not None] == [3, 6, 8]
    assert len(set(found)) == 4, "no update showed"


def test_nothing_of_training_is_other_than_before(one: OneRank) -> None:
    one.model.parts[1].eval()
    seen, pause = [], mock.MagicMock()

    def loss_of(given: Tensor) -> Tensor:
        torch.rand(3)
        training, ended = any(m.training for m in one.model.modules()), pause.return_value.__exit__.called
        seen.append((training, torch.is_grad_enabled(), ended))
        return one.model(given)

    plan = one.driver.plan = StepPlan(Ledger.empty(2), 1, 1, 1, ((0, 1),))
    plan.begin()
    modes, random = [m.training for m in one.model.modules()], torch.get_rng_state()
    params = {id(p) for p in one.model.parameters()}
    one.model(batch(0)).backward()
    told = plan.trained[-1].loss
    of(one, loss_of, pause=pause).at(3)
    pause.assert_called_once_with("evaluation of step 3")
    assert seen == [(False, False, False)] * BATCHES
    assert pause.return_value.__exit__.called
    assert [m.training for m in one.model.modules()] == modes
    assert {id(p) for p in one.model.parameters()} == params
    assert torch.equal(torch.get_rng_state(), random)
    assert plan.trained[-1].loss is told, "the loss of an evaluation was taken for that of the micro-batch"


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_the_batches_and_find_the_same_bits_whatever_their_number(one: OneRank, ranks: int) -> None:
    parts: list[Tensor] = []
    for rank in range(ranks):
        forward = mock.Mock(side_effect=one.model)
        with mock.patch.object(dist, "all_reduce", lambda part: parts.append(part.clone())):
            of(one, forward, rank, ranks).at(3)
        assert forward.call_count == math.ceil(BATCHES / ranks), "a forward is a collective"
    with mock.patch.object(dist, "all_reduce", lambda part: part.copy_(sum(parts))):
        assert of(one, None, 0, ranks).at(3) == expected(one)


def test_batches_count_by_the_weight_that_the_function_says(one: OneRank) -> None:
    losses = iter([(1.0, 2), (4.0, 1), (math.nan, 0), (1.0, 1), (math.nan, 0), *[(math.nan, 0)] * 5])

    def loss_of(given: Tensor) -> float:
        loss, evaluation.weight = next(losses)
        return loss

    evaluation = of(one, loss_of)
    assert evaluation.at(3) == (2 * 1.0 + 4.0 + 1.0) / 4
    assert math.isnan(evaluation.at(6) or 0.0)


def test_a_contributor_tells_the_loss_after_its_callbacks_and_one_that_catches_up_does_not(one: OneRank) -> None:
    heard: list[Any] = []
    one.callbacks.add("on_commit", lambda step: heard.append(step.step))
    one.driver.evaluation = of(one)
    for _ in range(3):
        one.commit()  # as in a replay
    one.driver.begin(replace(one.joined, evaluated=lambda state, loss: heard.append((state, loss))))
    for _ in range(3):
        one.commit()
    assert heard == [1, 2, 3, 4, 5, 6, (one.live.state, expected(one))]
    one.driver.replica = 2
    one.commit()
    one.commit()
    assert heard[7:] == [7, 8]


def test_an_error_in_the_user_s_function_ends_the_rank(one: OneRank, capsys: pytest.CaptureFixture[str]) -> None:
    one.driver.evaluation = of(one, lambda given: "0.5")
    one.driver.begin(replace(one.joined, evaluated=mock.Mock()))
    one.commit()
    one.commit()
    with pytest.raises(CallbackFailed):
        one.commit()
    assert "job.evaluate(loss_of): got '0.5'" in capsys.readouterr().err
    assert one.model.training


def test_what_cannot_be_evaluated_is_refused_before_training(mesh: DeviceMesh, tmp_path: Path) -> None:
    job = made(tmp_path, CONFIG)
    refused(lambda: job.evaluate(lambda given: 0.0, [1]), key="job.evaluate")  # type: ignore[arg-type]
    refused(lambda: job.evaluate(0.5, Numbered()), key="job.evaluate")  # type: ignore[arg-type]
    job.optimizer(torch.optim.AdamW(shard(job).parameters(), lr=0.1))
    refused(lambda: next(job.batches(Numbered())), key="eval.every")
    refused(lambda: parse({"eval": {"every": 5}}), key="eval.data")
    (tmp_path / "short.txt").write_text("too short")
    for name in ("short.txt", "none.txt"):
        given = {"every": 5, "data": str(tmp_path / name)}
        config = parse({"job": {"runs_dir": str(tmp_path)}, "eval": given})
        refused(partial(eval_dataset, config), key="eval.data")

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from ft_hsdp.analysis.commits import MAX_VALUES
from ft_hsdp.config import parse
from ft_hsdp.errors import ConfigError
from ft_hsdp.train.job import Job
from ft_hsdp.train.loop.callbacks import CommittedStep
from ft_hsdp.train.loop.user_loop import checked, checked_step, counts, log_measured, loggable
from tests.support.refused import refused
from tests.support.train.one_rank import OneRank
from tests.train.test_job import made

CONFIG = parse({"replicas": 2, "ranks_per_replica": 1})


def test_numbers_of_any_library_are_values() -> None:
    values = {"a": 1, "eval/loss": torch.tensor(0.5), "c_d.e-1": np.float32(2), "f": torch.tensor([3])}
    assert checked(values, set()) == {"a": 1.0, "eval/loss": 0.5, "c_d.e-1": 2.0, "f": 3.0}


def test_a_value_that_is_not_finite_is_null() -> None:
    values = {"a": float("nan"), "b": -np.inf, "c": torch.tensor(float("inf")), "d": 0, "e": 10**400}
    assert checked(values, set()) == {"a": None, "b": None, "c": None, "d": 0.0, "e": None}


@pytest.mark.parametrize("value", ["0.5", True, None, torch.ones(2)])
def test_what_is_no_number_is_refused_by_name(value: Any) -> None:
    refused(lambda: checked({"loss": value}, set()), key="job.log(loss)")


@pytest.mark.parametrize("values", [{"a b": 1.0}, {"a" * 65: 1.0}, {3: 1.0}, [1.0]])
def test_values_have_names(values: Any) -> None:
    refused(lambda: checked(values, set()), key="job.log")


def test_the_number_of_names_is_bounded_over_all_calls() -> None:
    known: set[str] = set()
    checked({f"n{i}": i for i in range(MAX_VALUES)}, known)
    checked({"n0": 5.0}, known)
    refused(lambda: checked({"one_more": 1.0}, known), f"at most {MAX_VALUES} names")


@pytest.mark.parametrize(
    ("measured", "taken"),
    [
        ("eval_my set_loss", "eval_my_set_loss"),
        ("top-5 (%)", "top-5_pct"),
        ("5-shot", "value_5-shot"),
        ("eval_\u00e9t\u00e9", "eval__xe9t_xe9"),
        ("kept__as_it_is_", "kept__as_it_is_"),
        ("", "value_"),
        (f"eval_{'a' * 90}_loss", f"eval_{'a' * 26}_{'a' * 27}_loss"),
    ],
)
def test_any_name_of_a_trainer_is_one_that_a_job_takes(measured: str, taken: str) -> None:
    assert loggable({measured: 0.5}, set()) == {taken: 0.5}
    assert checked({taken: 0.5}, set()) == {taken: 0.5}


def test_what_a_trainer_measures_and_a_job_cannot_take_is_left_out_and_told_once(tmp_path, caplog) -> None:
    job = made(tmp_path, CONFIG)
    job.logged_names.update(f"n{i}" for i in range(MAX_VALUES - 1))
    measured = {"n0": 0, "flag": True, "word": "x", "n none": None, "one_more": 1.0, "too many": 1.0, "again": 1.0}
    for _ in range(2):
        assert loggable(measured, job.logged_names) == {"n0": 0, "one_more": 1.0}
        refused(lambda: log_measured(job, measured), "got 'n0, one_more'", "job.log")
    assert len(caplog.records) == 4
    refused(lambda: log_measured(job, [1.0]), key="job.log")


def test_what_a_trainer_measures_after_the_job_is_left_out_and_told_once(tmp_path, caplog) -> None:
    job = made(tmp_path, CONFIG)
    with mock.patch.object(job, "_runtime"):  # it has joined
        job.close()
    for _ in range(2):
        log_measured(job, {"late": 1.0})
    refused(lambda: job.log({"late": 1.0}), "got 'late'", "job.log")
    assert len(caplog.records) == 1


def test_values_are_of_a_committed_step() -> None:
    assert (checked_step(None, 5), checked_step(0, 5), checked_step(5, 5)) == (5, 0, 5)
    for strange in (6, -1, True, 1.0, "1"):
        with pytest.raises(ConfigError, match=r"job.log\(step\): got .*; allowed: a committed step, 0 to 5"):
            checked_step(strange, 5)


def test_one_replica_s_values_count() -> None:
    last = CommittedStep(5, (1, 3), 1.0, 1.0, 0.1, 2, True, 1)
    assert [counts(r, 5, last) for r in range(4)] == [False, True, False, False]
    assert [counts(r, 0, None) for r in range(2)] == [True, False], "before the first step"
    assert not counts(0, 5, None), "a state that was fetched: those that applied the step tell its values"


def test_a_value_of_a_callback_on_a_commit_is_of_the_epoch_of_that_commit(mesh: DeviceMesh, tmp_path) -> None:
    config, log = parse({"replicas": 2, "ranks_per_replica": 1}), mock.Mock()
    one, job = OneRank(mesh, config), made(tmp_path, config)
    one.callbacks.add("on_commit", lambda step: job.log({"norm": step.gradient_norm}))
    parts = {"_runtime": one.runtime, "_driver": one.driver, "_live_state": one.live, "_log": log}
    with mock.patch.multiple(job, create=True, **parts), mock.patch.object(Job, "replica", 0):
        one.commit()
    log.logged.assert_called_once_with(1, one.record().epoch, {"norm": 0.5})


def test_before_the_first_batch_there_is_no_step_whose_values_these_are(tmp_path: Path) -> None:
    job = made(tmp_path, CONFIG)
    refused(lambda: job.log({"early": 1.0}), "got 'early';", "job.log")

"""What `job.log` takes, whose values count, and where they go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from ft_hsdp.analysis.commits import MAX_VALUES
from ft_hsdp.config import parse
from ft_hsdp.errors import ConfigError
from ft_hsdp.train.loop.callbacks import CommittedStep
from ft_hsdp.train.loop.logged_values import checked, checked_step, counts
from ft_hsdp.train.step_log import StepLog
from tests.train.loop.test_callbacks import Stepping
from tests.train.test_job import made


def test_numbers_of_any_library_are_values() -> None:
    values = {"a": 1, "eval/loss": torch.tensor(0.5), "c_d.e-1": np.float32(2), "f": torch.tensor([3])}
    assert checked(values, set()) == {"a": 1.0, "eval/loss": 0.5, "c_d.e-1": 2.0, "f": 3.0}


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"loss": float("nan")}, r"job.log\(loss\): got nan; allowed: a finite number"),
        ({"loss": float("inf")}, r"job.log\(loss\): got inf; allowed: a finite number"),
        ({"loss": torch.tensor(float("nan"))}, r"job.log\(loss\): got .*nan.*; allowed: a finite number"),
        ({"loss": "0.5"}, r"job.log\(loss\): got '0.5'; allowed: a finite number"),
        ({"loss": True}, r"job.log\(loss\): got True; allowed: a finite number"),
        ({"loss": None}, r"job.log\(loss\): got None; allowed: a finite number"),
        ({"loss": torch.ones(2)}, r"job.log\(loss\): got 'a tensor of shape \[2\]'; allowed: a finite number"),
        ({"a b": 1.0}, "job.log: got 'a b'; allowed: 1 to 64 letters"),
        ({"a" * 65: 1.0}, "job.log: got 'a+'; allowed: 1 to 64 letters"),
        ({3: 1.0}, "job.log: got 3; allowed: 1 to 64 letters"),
        ([1.0], r"job.log: got \[1.0\]; allowed: a mapping"),
    ],
)
def test_what_is_no_value_is_refused_in_one_line(values: Any, line: str) -> None:
    with pytest.raises(ConfigError, match=f"^{line}"):
        checked(values, set())


def test_the_number_of_names_is_bounded_over_all_calls() -> None:
    known: set[str] = set()
    checked({f"n{i}": i for i in range(MAX_VALUES)}, known)
    checked({"n0": 5.0}, known)
    with pytest.raises(ConfigError, match=f"job.log: got 'one_more'; allowed: at most {MAX_VALUES} names"):
        checked({"one_more": 1.0}, known)


def test_values_are_of_a_committed_step() -> None:
    assert (checked_step(None, 5), checked_step(0, 5), checked_step(5, 5)) == (5, 0, 5)
    for strange in (6, -1, True, 1.0, "1"):
        with pytest.raises(ConfigError, match=r"job.log\(step\): got .*; allowed: a committed step, 0 to 5"):
            checked_step(strange, 5)


def test_one_replica_s_values_count() -> None:
    last = CommittedStep(5, (1, 3), 1.0, 1.0, 0.1, 2, True)
    assert [counts(r, 5, last) for r in range(4)] == [False, True, False, False]
    assert [counts(r, 0, None) for r in range(2)] == [True, False], "before the first step"
    assert not counts(0, 5, None), "a state that was fetched: those that applied the step tell its values"


def test_a_call_writes_one_row_on_the_replica_that_counts(mesh: DeviceMesh, tmp_path: Path) -> None:
    with made(mesh, tmp_path, parse({"replicas": 2, "ranks_per_replica": 1})) as job:
        stepping = Stepping(job)
        with pytest.raises(ConfigError, match=r"job.log: got 'early'; allowed: a call in the loop"):
            job.log({"early": 1.0})
        told: list[Any] = []
        job._log = StepLog(tmp_path, "1-x-0", tee_logged=told.append)
        job._runtime = stepping.runtime
        stepping.commit()
        job.log({"accuracy": 0.5})  # replica 1 of the contributors 0 and 1
        assert not (tmp_path / "logged.jsonl").exists()
        assert stepping.job._identity is not None
        object.__setattr__(stepping.job._identity, "replica", 0)
        stepping.commit()
        job.log({"accuracy": 0.5})
        job.log({"late": 1.0}, step=1)
        job._log.close()
        rows = [json.loads(line) for line in (tmp_path / "logged.jsonl").read_text().splitlines()]
        assert rows == told
        assert [(r["step"], r["epoch"], r["values"]) for r in rows] == [
            (2, 1, {"accuracy": 0.5}),
            (1, 1, {"late": 1.0}),
        ]

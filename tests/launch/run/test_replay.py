from __future__ import annotations

from pathlib import Path

import pytest

from ft_hsdp.config import Config, dump
from ft_hsdp.core.ledger import BatchAssigner, Ledger
from ft_hsdp.errors import ConfigError
from ft_hsdp.launch.run.directory import RunDir, write_json
from ft_hsdp.launch.run.replay import _as_assigned, replay
from tests.support.launch.launch_rows import commit

ROW = commit(3, who=[0, 2])  # both at batch 2 of their shards


@pytest.mark.parametrize(
    ("assigner", "ledger", "right"),
    [
        (BatchAssigner("per_replica", 3), Ledger((2, 1, 2)), True),
        (BatchAssigner("per_replica", 3), Ledger((2, 1, 1)), False),
        (BatchAssigner("per_replica", 3), Ledger((2, 1, 4), ((2, 2),)), True),
        (BatchAssigner("global", 3), Ledger((2,)), False),
    ],
)
def test_a_replay_sees_a_batch_that_was_not_assigned(assigner: BatchAssigner, ledger: Ledger, right: bool) -> None:
    assert _as_assigned(assigner, ledger, ROW) is right


def test_a_run_of_a_users_own_loop_is_refused_with_the_reason(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "mine")
    run.final(0).parent.mkdir(parents=True)
    run.config.write_text(dump(Config()))
    write_json(run.final(0), {"step": 1, "commit_epoch": 1, "lineage": "L", "digest": "d", "loop": "own"})
    with pytest.raises(ConfigError, match=r"allowed: a run of the built-in trainer: .*cannot be repeated"):
        replay(run)

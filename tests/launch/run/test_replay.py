from pathlib import Path
from types import SimpleNamespace

import pytest

from ft_hsdp.config import Config, dump
from ft_hsdp.core.effects import RunBatch
from ft_hsdp.core.ledger import Ledger
from ft_hsdp.jsonl import replace_json
from ft_hsdp.launch.run.directory import RunDir
from ft_hsdp.launch.run.replay import ReplaySegment, agreed, replay, segments
from ft_hsdp.train.replay.job import ReplayOutcome, Script
from tests.support.launch.launch_rows import commit
from tests.support.refused import refused


@pytest.mark.parametrize(
    ("ledger", "cursors", "right"),
    [
        (Ledger((2, 3, 2)), [3, 3, 3], True),
        (Ledger((2, 3, 4), ((2, 2, 1),)), [3, 3, 4], True),
        (Ledger((2, 3, 3)), [3, 3, 3], False),
        (Ledger((2, 2, 2)), [3, 3, 3], False),
    ],
)
def test_a_replay_sees_a_unit_that_was_trained_before(ledger: Ledger, cursors: list[int], right: bool) -> None:
    row = {**commit(3, who=[0, 2], digest="d", poisoned=[]), "cursors": cursors}
    config, rank, state = Config(), SimpleNamespace(replica=0), SimpleNamespace(ledger=ledger)
    script = Script([row], config.data_ranks, config, rank, state, *[None] * 3)  # type: ignore[arg-type]
    assert isinstance(next(script.orders), RunBatch) is right
    assert script.differs_at == (None if right else 3)


def test_a_run_of_a_users_own_loop_is_refused_with_the_reason(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "mine")
    run.final(0).parent.mkdir(parents=True)
    run.config.write_text(dump(Config()))
    replace_json(run.final(0), {"step": 1, "commit_epoch": 1, "lineage": "L", "digest": "d", "loop": "own"})
    refused(lambda: replay(run), r"allowed: a run of the built-in trainer or of an `entry`")


def test_the_steps_of_an_entry_are_divided_by_the_widths_of_their_members() -> None:
    """A ring of unequal members adds lane by lane also in a step to which one of them contributes nothing."""
    rows = [commit(step, who=[0]) for step in range(3, 10)]
    for row in rows[2:4]:
        row["contributions"][0]["width"] = 2
    rows[4]["ring_widths"] = rows[5]["ring_widths"] = [2, 4]
    rows[5]["contributions"][0]["width"] = 2
    found = segments(rows, 4)
    assert found == [
        ReplaySegment(3, 4, (4,)),
        ReplaySegment(5, 6, (2,)),
        ReplaySegment(7, 8, (4, 2)),
        ReplaySegment(9, 9, (4,)),
    ]


def test_a_width_that_no_replica_can_have_is_refused() -> None:
    rows = [commit(7) | {"ring_widths": [5, 4]}]
    refused(lambda: segments(rows, 4), r"^width: got \[5, 4\]; allowed: 1 to 4 ranks .* step 7")


@pytest.mark.parametrize(
    ("digests", "differs_at", "expected"),
    [("aa", (None, None), None), ("ab", (None, None), 9), ("ab", (None, 7), 7), ("aa", (8, 8), 8)],
)
def test_replicas_of_all_widths_have_to_find_the_same(digests, differs_at, expected) -> None:
    found = [ReplayOutcome(digest, step) for digest, step in zip(digests, differs_at, strict=True)]
    assert agreed(found, ReplaySegment(6, 9, (4, 2))) == ReplayOutcome("a", expected)

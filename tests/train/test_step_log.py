import json
from pathlib import Path

import pytest

from ft_hsdp.core.commit import CommitRecord, Contribution
from ft_hsdp.core.ledger import Ledger
from ft_hsdp.train.step_log import StepLog, Timing, exposed

RECORD = CommitRecord(
    epoch=3,
    attempt=1,
    step=7,
    prev="0" * 32,
    ring=(2, 0, 1),
    total=4,
    contributions=(Contribution(0, 1, 0, 6, 1.0), Contribution(2, 3, 2, 4, 2.0, 3, 1)),
    digest="d",
    norm=0.5,
    lr_scale=0.7,
    chunk_bytes=64,
    wanted=5,
)


def rows(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_batch_is_logged_before_anything_else_can_happen(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "0", "0-x-1")
    log.fed(7, 2, 10, 2)
    (row,) = rows(tmp_path / "0" / "fed.jsonl")  # unbuffered: it is there without a close
    assert row.pop("t")
    assert row == {"step": 7, "shard": 2, "index": 10, "units": 2, "incarnation": "0-x-1"}


def test_a_commit_has_all_that_a_replay_needs(tmp_path: Path) -> None:
    log = StepLog(tmp_path, "0-x-1")
    timing = Timing(0.5, {"ftar": 0.15, "commit": 0.05}, 1000, 0.1)
    log.committed(RECORD, 0.01, 4096, timing, False, Ledger((7, 9, 7), ((1, 3, 2),)))
    (row,) = rows(tmp_path / "commits.jsonl")
    assert row["lineage"] == RECORD.state_id.lineage
    for key in ("step", "epoch", "attempt", "prev", "norm", "lr_scale", "total", "chunk_bytes"):
        assert row[key] == getattr(RECORD, key)
    assert row["ring"] == [2, 0, 1]
    assert row["contributors"] == [0, 2]
    assert row["poisoned"] == []
    assert row["contributions"] == [
        {"replica": 0, "weight": 1, "shard": 0, "index": 6, "loss": 1.0, "units": 1, "part": 0, "width": 0},
        {"replica": 2, "weight": 3, "shard": 2, "index": 4, "loss": 2.0, "units": 3, "part": 1, "width": 0},
    ]
    assert (row["cursors"], row["holes"]) == ([7, 9, 7], [[1, 3, 2]])
    assert (row["units"], row["units_wanted"]) == (4, 5)
    assert (row["loss"], row["lr"], row["tokens"], row["role"]) == (1.75, 0.01, 4096, "behind")
    assert (row["step_s"], row["waits"], row["ftar_bytes"], row["ftar_s"]) == (
        0.5,
        {"ftar": 0.15, "commit": 0.05},
        1000,
        0.1,
    )


def test_a_new_life_appends(tmp_path: Path) -> None:
    for life in ("0-x-0", "0-x-1"):
        StepLog(tmp_path, life).committed(RECORD, 0.01, 1, Timing(0.5, {}, 0, 0.0), True, Ledger((1,)))
    assert [r["incarnation"] for r in rows(tmp_path / "commits.jsonl")] == ["0-x-0", "0-x-1"]


def test_the_final_state_is_there_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    log = StepLog(tmp_path, "0-x-1")
    log.final(RECORD.state_id, "ab" * 32, "e" * 64, built_in=True, of_job=True)
    log.final(RECORD.state_id, "cd" * 32, "f" * 64, built_in=False, of_job=False)
    said = json.loads((tmp_path / "final.json").read_text())
    assert said == {
        "commit_epoch": 3,
        "step": 7,
        "lineage": RECORD.state_id.lineage,
        "digest": "cd" * 32,
        "incarnation": "0-x-1",
        "loop": "own",
        "config_hash": "f" * 64,
        "of_job": False,
    }
    assert sorted(p.name for p in tmp_path.iterdir()) == ["commits.jsonl", "fed.jsonl", "final.json"]


@pytest.mark.parametrize(
    ("now", "waited", "reduced", "held_up", "quorum", "ftar"),
    [
        (10.0, 2.0, 9.5, 0.0, 0.0, 1.5),
        (10.0, 2.0, 7.0, 0.0, 0.0, 0.0),
        (10.0, 2.0, 10.0, 0.0, 0.0, 2.0),
        (10.0, 0.0, 9.0, 0.0, 0.0, 0.0),
        (10.0, 2.0, 9.5, 0.5, 0.5, 1.0),  # the ring would have ended half a second earlier
        (10.0, 2.0, 9.5, 5.0, 1.5, 0.0),  # most of it was hidden under backward
        (10.0, 2.0, 7.0, 0.5, 0.0, 0.0),  # all of it was
    ],
)
def test_what_is_not_hidden_under_backward_has_a_cause(now, waited, reduced, held_up, quorum, ftar) -> None:
    commit = waited - ftar - quorum
    assert exposed(now, waited, reduced, held_up) == {"quorum": quorum, "ftar": ftar, "commit": commit}


def test_a_vote_waits_for_the_snapshot_first_and_then_for_copies() -> None:
    found = exposed(10.0, 2.0, 8.5, 0.0, copying=0.25, packing=0.5)
    assert found == {"quorum": 0.0, "ftar": 0.5, "commit": 0.75, "snapshot": 0.5, "copies": 0.25}
    assert exposed(10.0, 2.0, 9.0, 0.0, copying=5.0, packing=5.0)["snapshot"] == 1.0


def test_whoever_else_keeps_commits_hears_of_each(tmp_path: Path) -> None:
    heard: list[object] = []
    StepLog(tmp_path, "0-x-0", heard.append).committed(
        RECORD, 0.01, 1, Timing(0.5, {}, 0, 0.0), True, Ledger((1,))
    )
    assert heard == rows(tmp_path / "commits.jsonl")

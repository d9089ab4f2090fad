from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp.analysis.commits import CommitMerger
from ft_hsdp.config import parse
from ft_hsdp.launch.run.directory import Row
from ft_hsdp.launch.run.summary import RunTally
from tests.support.launch.launch_rows import batches, commit, event, fed, summarize

CONFIG = parse({"replicas": 3})


def history(steps: int, **fields: Any) -> list[Row]:
    return [commit(n, **fields) for n in range(1, steps + 1)]


def test_the_figures_of_a_quiet_run() -> None:
    rows = history(20)
    finals = {
        r: {"step": 20, "commit_epoch": 1, "lineage": "L20", "digest": "d", "incarnation": "i"} for r in range(3)
    }
    events = [event("ReplicaStarted", 999.0, replica=r, incarnation=f"{r}-a-0") for r in range(3)]
    summary = summarize(CONFIG, rows, fed(rows), finals, events)
    assert summary["steps"] == 20
    assert summary["loss_first"] == pytest.approx((2.99 + 2.98) / 2)
    assert summary["loss_last"] == pytest.approx((2.80 + 2.81) / 2)
    assert summary["wall_s"] == pytest.approx(20.0)
    assert summary["tokens"] == 2000
    assert summary["effective_training_ratio"] == pytest.approx(1.0)
    assert summary["stall_s"] == {"ring": pytest.approx(5.0)}
    assert summary["replicas"] == {
        str(r): {"step": 20, "lineage": "L20", "digest": "d", "incarnations": 1} for r in range(3)
    }
    assert summary["batches"] == {"trained": 60, "duplicated": 0, "skipped": 0}
    assert summary["failures"] == []
    assert "lost" not in summary
    json.dumps(summary, allow_nan=False)


def test_the_effective_ratio_counts_contributors_over_all_replicas() -> None:
    rows = [
        commit(1),
        commit(2, who=[0, 2]),
        commit(3, who=[0, 2], t=1004.0, step_s=2.0),
        commit(4, t=1005.0),
    ]
    summary = summarize(CONFIG, rows, fed(rows), {}, [])
    assert summary["effective_training_ratio"] == pytest.approx((1 + 2 / 3 + 2 / 3 + 1) / 5.0)


def test_a_job_that_is_scaled_counts_contributors_over_those_that_were_wanted() -> None:
    rows = [commit(1), commit(2), commit(3, who=[0], total=1), commit(4, who=[0, 1, 2, 3], total=4)]
    events = [event("ReplicaStarted", 999.0, replica=r, incarnation=f"{r}-a-0") for r in range(4)]
    summary = summarize(parse({"replicas": 3, "max_replicas": 9}), rows, fed(rows), {}, events)
    assert summary["effective_training_ratio"] == pytest.approx(1.0)
    assert {r: s["step"] for r, s in summary["replicas"].items()} == {"0": 4, "1": 4, "2": 4, "3": 4}


def test_a_run_without_a_step_has_a_summary() -> None:
    summary = summarize(CONFIG, [], {}, {}, [], lost=[2, 0])
    assert summary["steps"] == 0
    assert summary["lost"] == [0, 2]
    assert summary["replicas"]["1"] == {"step": 0, "lineage": "", "digest": "", "incarnations": 0}


def test_a_batch_that_the_ledger_claims_but_nobody_fed_is_skipped() -> None:
    rows = history(5)
    logs = fed(rows)
    logs[1] = [line for line in logs[1] if line["index"] != 3]
    assert batches(rows, logs) == {"trained": 14, "duplicated": 0, "skipped": 1}


def test_feeding_another_batch_than_the_ledger_says_is_seen() -> None:
    rows = history(3)
    logs = fed(rows)
    logs[0][1]["index"] = 0  # replayed its last batch
    assert batches(rows, logs) == {"trained": 8, "duplicated": 0, "skipped": 1}


def test_a_batch_in_two_commits_is_duplicated_and_feeding_it_again_for_one_is_not() -> None:
    rows = history(3)
    again = fed(rows)
    again[2] += again[2]
    assert batches(rows, again) == {"trained": 9, "duplicated": 0, "skipped": 0}
    rows[2]["contributions"][0]["index"] = 1
    assert batches(rows, fed(rows)) == {"trained": 8, "duplicated": 1, "skipped": 0}


def test_the_first_cursor_is_zero_unless_the_run_was_resumed() -> None:
    late = [commit(1, who=[0]), commit(2)]
    late[1]["contributions"][1]["index"] = 1  # shard 1 begins at 1
    late[1]["contributions"][2]["index"] = 0
    assert batches(late, fed(late))["skipped"] == 1
    resumed = [commit(n) for n in (41, 42)]
    assert batches(resumed, fed(resumed)) == {"trained": 6, "duplicated": 0, "skipped": 0}
    resumed[1]["contributions"][2]["index"] = 42  # jumps over batch 41
    assert batches(resumed, fed(resumed)) == {"trained": 6, "duplicated": 0, "skipped": 1}


def test_a_hole_is_not_skipped() -> None:
    rows = [commit(1), commit(3, prev="L1")]
    assert batches(rows, fed(rows))["skipped"] == 3
    rows[-1]["holes"] = [[0, 1], [1, 1], [2, 1]]
    assert batches(rows, fed(rows))["skipped"] == 0


def dealt(step: int, indices: dict[int, int], cursor: int, *holes: int) -> Row:
    """A row of a job whose replicas take from one sequence: replica -> index."""
    contributions = [{"replica": r, "weight": 1, "shard": 0, "index": i, "loss": 2.0} for r, i in indices.items()]
    left = [[0, hole] for hole in holes]
    return commit(step, who=list(indices), contributions=contributions, cursors=[cursor], holes=left)


def test_holes_of_one_sequence_are_trained_later_or_left_at_the_end() -> None:
    rows = [dealt(1, {0: 0, 2: 2}, 3, 1), dealt(2, {0: 1, 2: 3}, 4), dealt(3, {2: 5}, 6, 4)]
    assert batches(rows, fed(rows)) == {"trained": 5, "duplicated": 0, "skipped": 0}
    assert batches(rows[:1], fed(rows)) == {"trained": 2, "duplicated": 0, "skipped": 0}
    rows[-1]["holes"] = []
    assert batches(rows, fed(rows)) == {"trained": 5, "duplicated": 0, "skipped": 1}
    rows[-1]["contributions"][0]["index"] = 1
    assert batches(rows, fed(rows)) == {"trained": 4, "duplicated": 1, "skipped": 0}


def test_a_resumed_run_trains_the_holes_that_it_finds() -> None:
    rows = [dealt(31, {0: 5, 1: 90}, 91, 7, 8), dealt(32, {0: 7, 1: 91}, 92, 8)]  # began with 5, 7, 8 left out
    assert batches(rows, fed(rows)) == {"trained": 4, "duplicated": 0, "skipped": 0}
    rows[-1]["holes"] = []
    assert batches(rows, fed(rows)) == {"trained": 4, "duplicated": 0, "skipped": 1}
    logs = fed(rows)
    del logs[0][0]  # nobody fed 5
    assert batches(rows, logs) == {"trained": 3, "duplicated": 0, "skipped": 2}


@given(st.lists(st.sets(st.integers(0, 2), min_size=1), min_size=1, max_size=12), st.data())
def test_with_true_cursors_every_dropped_feed_is_a_skip(present: list[set[int]], data: st.DataObject) -> None:
    cursors = [0, 0, 0]
    rows = []
    for step, who in enumerate(present, 1):
        row = commit(step, who=sorted(who))
        for c in row["contributions"]:
            c["index"] = cursors[c["shard"]]
            cursors[c["shard"]] += 1
        rows.append(row)
    logs = fed(rows)
    assert batches(rows, logs) == {"trained": sum(cursors), "duplicated": 0, "skipped": 0}
    replica = data.draw(st.sampled_from(sorted(logs)))
    logs[replica].pop(data.draw(st.integers(0, len(logs[replica]) - 1)))
    assert batches(rows, logs) == {"trained": sum(cursors) - 1, "duplicated": 0, "skipped": 1}


def test_a_month_is_summed_up_in_constant_memory() -> None:
    """After ten thousand steps nothing that a run's driver keeps of its steps grows with them."""
    merger, tally, steps = CommitMerger(), RunTally(CONFIG), 12_000
    sizes = []
    for step in range(1, steps + 1):
        row = commit(step)
        merger.add([row, dict(row), dict(row)])
        for replica in range(3):
            tally.fed(
                replica, {"step": step, "shard": replica, "index": step - 1, "incarnation": f"{replica}-a-0"}
            )
        for told in merger.confirmed():
            tally.commit(told)
        if step in (10_000, steps):
            sizes.append(len(pickle.dumps((merger.__dict__, tally.__dict__))))
    for told in merger.finish():
        tally.commit(told)
    summary = tally.summary({})
    assert abs(sizes[1] - sizes[0]) < 20_000
    assert summary["batches"] == {"trained": 3 * steps, "duplicated": 0, "skipped": 0}
    assert summary["loss_last"] == pytest.approx(3.0 - (steps - steps / 20) / 100, rel=1e-3)

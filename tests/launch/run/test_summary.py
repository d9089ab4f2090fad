import json
import os
import pickle
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp.analysis.commits import CommitMerger
from ft_hsdp.config import parse
from ft_hsdp.launch.run.audit import UnitAudit
from ft_hsdp.launch.run.directory import Row, RunDir
from ft_hsdp.launch.run.recorder import Recorder
from ft_hsdp.launch.run.summary import RunTally
from ft_hsdp.launch.run.terminal import summary_lines
from tests.support.launch.launch_rows import batches, commit, event, fed, summarize

CONFIG = parse({"replicas": 3, "ranks_per_replica": 1})


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


def test_each_recovery_is_a_row() -> None:
    facts = {
        "number": 1,
        "state": [1, 2, "a" * 32],
        "rung": "replica",
        "ranks": 2,
        "hosts": {"0": "r0h0", "1": "s0"},
        "from": {"0": "r1h0", "1": "r0h1"},
        "bytes": 10,
        "seconds": 0.2,
        "lost_steps": 1,
    }
    rows = history(3)
    events = [event("StateRestored", 1000.0, replica=1, step=2, origin="replica", **facts)]
    summary = summarize(CONFIG, rows, fed(rows), {}, events)
    assert summary["recoveries"] == [{"replica": 1, **facts}]


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


def dealt(step: int, indices: dict[int, int], cursor: int, *holes: int) -> Row:
    """A row of a job whose replicas take from one sequence: replica -> index."""
    one = {"weight": 1, "shard": 0, "loss": 2.0, "units": 1, "part": 0}
    contributions = [{**one, "replica": r, "index": i} for r, i in indices.items()]
    left = [[0, hole, 1] for hole in holes]
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


def test_runs_of_units_are_trained_piece_by_piece() -> None:
    """Two ranks: each line of the log is a micro-batch of two units, a contribution may have several of them."""
    one = {"replica": 0, "shard": 0, "loss": 2.0, "weight": 6, "part": 0}
    runs = [{**one, "index": 4, "units": 2}, {**one, "index": 10, "units": 6}]
    rows = [
        commit(1, ranks=2),
        commit(2, who=[0], contributions=runs, cursors=[16, 2, 2], holes=[[0, 2, 2], [0, 6, 4]]),
    ]
    log = [{"step": 2, "shard": 0, "index": n, "units": 2, "incarnation": "0-a-0"} for n in (4, 10, 12, 14)]
    first = fed(rows[:1])
    audit = UnitAudit(2)
    for replica, lines in {**first, 0: [*first[0], *log[:-1]]}.items():
        for line in lines:
            audit.fed(replica, line)
    for row in rows:
        audit.commit(row)
    assert audit.result() == {"trained": 12, "duplicated": 0, "skipped": 2}
    audit.fed(0, log[-1])
    assert audit.result() == {"trained": 14, "duplicated": 0, "skipped": 0}


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
            line = {"step": step, "shard": replica, "index": step - 1, "units": 1}
            tally.fed(replica, {**line, "incarnation": f"{replica}-a-0"})
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


# The recorder of a driver that looks while replicas never pause: what it keeps does not grow with the steps.


REPLICAS = 8
LOOKS, STEPS = 40, 50  # steps between two looks; in all more than what one look may read ahead


def test_what_was_fed_is_read_as_far_as_the_commits_even_if_each_look_finds_commits(tmp_path: Path) -> None:
    run, who = RunDir(tmp_path / "job"), range(REPLICAS)
    config = parse({"replicas": REPLICAS, "ranks_per_replica": 1, "train": {"steps": LOOKS * STEPS}})
    recorder, awaited = Recorder(run, config, lambda _: None, lambda _: None), []
    for look in range(LOOKS):
        steps = range(1 + look * STEPS, 1 + (look + 1) * STEPS)
        rows = [commit(n, who=who, total=REPLICAS, ring=[*who], cursors=[n] * REPLICAS) for n in steps]
        for replica, lines in fed(rows).items():
            append(run.commits(replica), rows)
            append(run.fed(replica), lines)
        recorder.poll()
        awaited.append(recorder.awaited)
    recorder.close()
    assert max(awaited) <= REPLICAS * STEPS, "lines of what was fed lag behind the commits"


def append(path: Path, rows: list[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.mark.parametrize(
    "damage", [Path.unlink, partial(os.truncate, length=0), lambda file: (file.unlink(), file.mkdir())]
)
def test_units_whose_log_was_damaged_are_not_called_skipped(tmp_path: Path, damage: Callable[[Path], Any]) -> None:
    run, now = RunDir(tmp_path / "job"), time.time()
    recorder = Recorder(run, parse({"replicas": 2, "ranks_per_replica": 1}), lambda _: None, lambda _: None)
    rows = [commit(n, who=(0, 1), total=2, cursors=[n] * 2, t=now) for n in range(1, 11)]
    for part in (rows[:5], rows[5:]):
        for replica, lines in fed(part).items():
            append(run.commits(replica), part)
            if replica == 0 or part == rows[:5]:
                append(run.fed(replica), lines)
        recorder.poll()
        if part == rows[:5]:
            damage(run.fed(1))
    assert recorder.finish()["batches"] == {"trained": 15, "duplicated": 0, "skipped": 0, "unlogged": 5}
    recorder.close()


# What a machine took with it when it vanished is counted apart: neither trained, nor skipped, nor overlooked.


LOGGED_STEPS = 10


def two_replicas() -> list[Row]:
    return [commit(step, who=(0, 1), total=2) for step in range(1, LOGGED_STEPS + 1)]


def logs_without(without: set[int], life: dict[int, int] | None = None) -> dict[int, list[Row]]:
    """The logs of both replicas, without some steps of replica 1; life: its restarts, by step."""
    logs: dict[int, list[Row]] = {0: [], 1: []}
    for step in range(1, LOGGED_STEPS + 1):
        for replica in (0, 1):
            if replica == 0 or step not in without:
                lives = (life or {}).get(step, 0) if replica else 0
                line = {"step": step, "shard": replica, "index": step - 1, "units": 1, "t": 0.0}
                logs[replica].append({**line, "incarnation": f"{replica}-abc-{lives}"})
    return logs


def test_the_last_lines_of_a_log_that_was_cut_are_missed_and_not_skipped() -> None:
    lives = dict.fromkeys(range(7, LOGGED_STEPS + 1), 1)
    logs = logs_without({5, 6}, lives)
    assert batches(two_replicas(), logs) == {"trained": 18, "duplicated": 0, "skipped": 2}
    assert batches(two_replicas(), logs, ["1-abc-0"]) == {
        "trained": 18,
        "duplicated": 0,
        "skipped": 0,
        "unlogged": 2,
    }


@pytest.mark.parametrize(
    ("missing", "cut"),
    [
        ({3}, "1-abc-0"),  # a later line of the same incarnation arrived
        ({8}, "1-abc-0"),  # the next incarnation fed it
        ({5}, "0-abc-0"),  # another replica's log was cut
        ({5}, "1-abc-1"),  # the cut was later
    ],
)
def test_a_line_that_cannot_have_been_lost_is_a_batch_that_was_skipped(missing: set[int], cut: str) -> None:
    lives = dict.fromkeys(range(6, LOGGED_STEPS + 1), 1)
    assert batches(two_replicas(), logs_without(missing, lives), [cut])["skipped"] == 1


def test_a_batch_without_its_line_counts_as_a_duplicate_all_the_same() -> None:
    rows = two_replicas()
    rows[6]["contributions"][0].update(shard=1, index=5)  # replica 0 trains again what replica 1 has trained
    logs = logs_without({6}, dict.fromkeys(range(7, LOGGED_STEPS + 1), 1))
    logs[0][6].update(shard=1, index=5)
    assert batches(rows, logs, ["1-abc-0"])["duplicated"] == 1


def test_only_the_log_of_rank_0_tells_what_was_fed_and_the_user_is_told() -> None:
    def cut(rank: int) -> dict[str, Any]:
        events = [event("LogCut", 0.0, replica=1, rank=rank, incarnation="1-abc-0")]
        logs = logs_without({10})
        return summarize(parse({"replicas": 2, "ranks_per_replica": 1}), two_replicas(), logs, {}, events)

    assert cut(1)["batches"] == {"trained": 19, "duplicated": 0, "skipped": 1}
    assert cut(0)["batches"] == {"trained": 19, "duplicated": 0, "skipped": 0, "unlogged": 1}
    assert "1 in logs" in dict(summary_lines(cut(0)))["units"]


@pytest.mark.parametrize(
    ("cut", "fed", "missed"),
    [
        ("0-abc-0", False, True),
        ("0-abc-0", True, True),  # one of the two lines of the step arrived
        ("0-abc-1", False, False),  # the cut was later
        ("1-abc-0", False, False),  # another replica's log was cut
    ],
)
def test_the_step_that_a_lone_replica_lost_with_its_log_is_missed_and_not_skipped(cut, fed, missed) -> None:
    steps = [step for step in range(1, LOGGED_STEPS + 1) if step != 5]
    rows = [commit(step, who=(0,), total=1, incarnation=f"0-abc-{step > 5:d}") for step in steps]
    lines = [{"step": step, "shard": 0, "index": step - 1, "units": 1, "t": 0.0} for step in (*steps, 5)]
    log = [{**line, "incarnation": f"0-abc-{line['step'] > 5:d}"} for line in lines if fed or line["step"] != 5]
    found = {"trained": 9, "duplicated": 0, "skipped": 0 if missed else 1}
    assert batches(rows, {0: log}, [cut]) == found | ({"unlogged": 1} if missed else {})


def test_replicas_without_a_place_at_the_end_are_named() -> None:
    events = [
        event("ReplicaUnplaced", 1.0, replica=1),
        event("ReplicaUnplaced", 1.0, replica=0),
        event("ReplicaStarted", 2.0, replica=0),
    ]
    summary = summarize(parse({"replicas": 2}), two_replicas(), logs_without(set()), {}, events)
    assert summary["unplaced"] == [1]
    assert ("no place", "replicas 1") in summary_lines(summary)
    assert "unplaced" not in summarize(parse({"replicas": 2}), two_replicas(), logs_without(set()), {}, [])


def test_what_a_full_disk_did_not_take_is_unlogged_and_only_that() -> None:
    logs, when = logs_without({5, 9}), two_replicas()[4]["t"]
    found = batches(two_replicas(), logs, losses=[(when - 0.5, when)])
    assert (found["unlogged"], found["skipped"]) == (1, 1), "step 9 is another matter"


def test_steps_that_no_replica_could_log_are_unlogged() -> None:
    rows = [row for row in two_replicas() if row["step"] not in (4, 5)]
    times = rows[2]["t"]
    told = batches(rows, logs_without(set()), losses=[(times + 0.5, times + 2.0)])
    assert told == {"trained": 16, "duplicated": 0, "skipped": 0, "unlogged": 4}
    assert batches(rows, logs_without(set()))["skipped"] == 4

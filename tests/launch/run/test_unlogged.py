"""What a machine took with it when it vanished is counted apart: neither trained, nor skipped, nor overlooked."""

from __future__ import annotations

from typing import Any

import pytest

from ft_hsdp.config import parse
from ft_hsdp.launch.run.directory import Row
from ft_hsdp.launch.run.terminal import summary_lines
from tests.support.launch.launch_rows import batches, commit, event, summarize

STEPS = 10


def history() -> list[Row]:
    return [commit(step, who=(0, 1), total=2) for step in range(1, STEPS + 1)]


def fed(without: set[int], life: dict[int, int] | None = None) -> dict[int, list[Row]]:
    """The logs of both replicas, without some steps of replica 1; life: its restarts, by step."""
    logs: dict[int, list[Row]] = {0: [], 1: []}
    for step in range(1, STEPS + 1):
        for replica in (0, 1):
            if replica == 0 or step not in without:
                lives = (life or {}).get(step, 0) if replica else 0
                line = {"step": step, "shard": replica, "index": step - 1, "t": 0.0}
                logs[replica].append({**line, "incarnation": f"{replica}-abc-{lives}"})
    return logs


def test_the_last_lines_of_a_log_that_was_cut_are_missed_and_not_skipped() -> None:
    lives = dict.fromkeys(range(7, STEPS + 1), 1)
    logs = fed({5, 6}, lives)
    assert batches(history(), logs) == {"trained": 18, "duplicated": 0, "skipped": 2}
    assert batches(history(), logs, ["1-abc-0"]) == {"trained": 18, "duplicated": 0, "skipped": 0, "unlogged": 2}


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
    lives = dict.fromkeys(range(6, STEPS + 1), 1)
    assert batches(history(), fed(missing, lives), [cut])["skipped"] == 1


def test_a_batch_without_its_line_counts_as_a_duplicate_all_the_same() -> None:
    rows = history()
    rows[6]["contributions"][0].update(shard=1, index=5)  # replica 0 trains again what replica 1 has trained
    logs = fed({6}, dict.fromkeys(range(7, STEPS + 1), 1))
    logs[0][6].update(shard=1, index=5)
    assert batches(rows, logs, ["1-abc-0"])["duplicated"] == 1


def test_only_the_log_of_rank_0_tells_what_was_fed_and_the_user_is_told() -> None:
    def cut(rank: int) -> dict[str, Any]:
        events = [event("LogCut", 0.0, replica=1, rank=rank, incarnation="1-abc-0")]
        logs = fed({10})
        return summarize(parse({"replicas": 2, "ranks_per_replica": 2}), history(), logs, {}, events)

    assert cut(1)["batches"] == {"trained": 19, "duplicated": 0, "skipped": 1}
    assert cut(0)["batches"] == {"trained": 19, "duplicated": 0, "skipped": 0, "unlogged": 1}
    assert ("batches", "19 trained, 0 twice, 0 skipped, 1 in logs that are gone") in summary_lines(cut(0))


def test_replicas_without_a_place_at_the_end_are_named() -> None:
    events = [
        event("ReplicaUnplaced", 1.0, replica=1),
        event("ReplicaUnplaced", 1.0, replica=0),
        event("ReplicaStarted", 2.0, replica=0),
    ]
    summary = summarize(parse({"replicas": 2}), history(), fed(set()), {}, events)
    assert summary["unplaced"] == [1]
    assert ("no place", "replicas 1") in summary_lines(summary)
    assert "unplaced" not in summarize(parse({"replicas": 2}), history(), fed(set()), {}, [])


def test_what_a_full_disk_did_not_take_is_unlogged_and_only_that() -> None:
    logs = fed({5, 9})
    times = history()[4]["t"]
    assert batches(history(), logs, losses=[(times - 0.5, times)])["skipped"] == 1, "step 9 is another matter"
    assert batches(history(), logs, losses=[(times - 0.5, times)])["unlogged"] == 1


def test_steps_that_no_replica_could_log_are_unlogged() -> None:
    rows = [row for row in history() if row["step"] not in (4, 5)]
    times = rows[2]["t"]
    told = batches(rows, fed(set()), losses=[(times + 0.5, times + 2.0)])
    assert told == {"trained": 16, "duplicated": 0, "skipped": 0, "unlogged": 4}
    assert batches(rows, fed(set()))["skipped"] == 4

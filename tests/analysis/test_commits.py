import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp.analysis.commits import PATIENCE, CommitMerger, counted, metrics_row
from ft_hsdp.launch.run.directory import Row
from tests.support.launch.launch_rows import commit


def steps(rows: list[Row]) -> list[int]:
    return [row["step"] for row in rows]


@pytest.fixture
def merger() -> CommitMerger:
    return CommitMerger()


def test_a_step_appears_once_when_the_next_one_stands_on_it(merger: CommitMerger) -> None:
    merger.add([commit(1)])
    assert merger.confirmed() == []
    merger.add([commit(1), commit(2)])
    assert steps(merger.confirmed()) == [1]
    merger.add([commit(2), commit(1)])
    assert merger.confirmed() == []
    merger.add([commit(3)])
    assert steps(merger.confirmed()) == [2]
    assert steps(merger.finish("L3")) == [3]


def test_a_job_that_goes_back_by_several_steps_is_told_again_from_the_first_row() -> None:
    old = [commit(n) for n in range(1, 7)]
    new = [commit(n, lineage=f"R{n}", prev="L2" if n == 3 else f"R{n - 1}", epoch=2) for n in range(3, 9)]
    merger = CommitMerger()
    merger.add(old)
    assert steps(merger.confirmed()) == [1, 2, 3, 4, 5]
    merger.add(new[1:3])  # of a replica that came later
    assert merger.undone
    merger.add(new)
    assert merger.rewinds == ((2, 3),)
    again = CommitMerger(merger.rewinds)
    again.add(old)
    told = again.confirmed()
    again.add(new)
    told += again.confirmed() + again.finish("R8")
    assert [row["lineage"] for row in told] == ["L1", "L2", *(f"R{n}" for n in range(3, 9))]
    assert not again.undone


def test_at_the_end_the_final_lineage_decides_between_two_last_rows() -> None:
    for final in ("L2", "other"):
        merger = CommitMerger()
        merger.add([commit(1), commit(2), commit(2, lineage="other")])
        assert [row["lineage"] for row in merger.confirmed() + merger.finish(final)] == ["L1", final]


def test_the_first_contributors_row_wins_and_one_of_a_replica_behind_only_fills_in(merger: CommitMerger) -> None:
    merger.add([commit(1, role="behind", incarnation="behind"), commit(1, incarnation="a")])
    merger.add([commit(1, incarnation="b"), commit(2, role="behind", incarnation="behind"), commit(3)])
    told = merger.confirmed() + merger.finish("L3")
    assert [row["incarnation"] for row in told][:2] == ["a", "behind"]


def test_rows_before_the_first_contributors_row_are_waited_for_within_one_reading(merger: CommitMerger) -> None:
    merger.add([commit(2), commit(3)])  # replica 0 missed step 1, its log is read first
    merger.add([commit(1, who=[1, 2])])
    assert steps(merger.confirmed()) == [1, 2]


def test_a_resumed_run_starts_at_its_first_step(merger: CommitMerger) -> None:
    merger.add([commit(n) for n in range(41, 44)])
    assert steps(merger.confirmed() + merger.finish("L43")) == [41, 42, 43]


def test_a_row_that_nobody_wrote_does_not_stop_the_others(merger: CommitMerger) -> None:
    merger.add([commit(n) for n in (1, 2, 4, 5)])
    assert steps(merger.confirmed()) == [1]
    merger.add([commit(n) for n in range(6, 6 + PATIENCE)])
    assert steps(merger.confirmed()) == [2, *range(4, 5 + PATIENCE)]
    assert steps(merger.finish(f"L{5 + PATIENCE}")) == [5 + PATIENCE]
    at_once = CommitMerger()
    at_once.add([commit(n) for n in (1, 2, 4, 5, 7)])
    assert steps(at_once.confirmed() + at_once.finish("L7")) == [1, 2, 4, 5, 7]


@given(st.data())
def test_any_order_of_logs_and_any_reading_gives_the_same_history(data: st.DataObject) -> None:
    """Three logs, each a part of the true history with rolled-back rows between, read in pieces."""
    last = data.draw(st.integers(1, 8))
    true = [commit(n, epoch=2) for n in range(1, last + 1)]
    dead = [commit(n, lineage=f"dead{n}", epoch=1) for n in range(1, last + 1)]
    logs: list[list[Row]] = [[], [], []]
    for n in range(last):
        for holder in data.draw(st.sets(st.integers(0, 2), min_size=1)):
            logs[holder].append(true[n])
        if data.draw(st.booleans()):
            logs[data.draw(st.integers(0, 2))].append(dead[n])
    merger = CommitMerger()
    told: list[Row] = []
    for log in data.draw(st.permutations(logs)):
        merger.add(log)
        if data.draw(st.booleans()) and told:
            told += merger.confirmed()
    told += merger.finish(f"L{last}")
    assert [row["lineage"] for row in told] == [f"L{n}" for n in range(1, last + 1)]


def test_a_metrics_row_has_what_the_contract_names() -> None:
    row = metrics_row(commit(1))
    assert {"t", "step", "epoch", "loss", "lr", "lr_scale", "contributors", "step_s", "waits"} <= row.keys()
    assert {"ftar_bytes", "ftar_s", "attempt", "lineage", "tokens", "holes"} <= row.keys()
    assert "contributions" not in row


@pytest.mark.parametrize(
    "changed", [{"units": 2**40}, {"units": -1}, {"index": -1}, {"index": "0"}, {"shard": None}, {"units": 1.5}]
)
def test_a_commit_whose_units_are_damaged_is_not_counted_up_to(changed: Row) -> None:
    """2^40 units are what a flipped bit makes of one."""
    row = commit(4)
    assert counted(row)
    assert counted({**row, "given_up": [[0, 3, 2]]})
    assert not counted({**row, "given_up": [[0, 3, 2**40]]})
    assert not counted({**row, "given_up": [[0, 3]]})
    assert not counted({**row, "contributions": [{**row["contributions"][0], **changed}]})
    assert not counted({**row, "contributions": [{"replica": 0}]})
    assert not counted({key: value for key, value in row.items() if key != "cursors"})

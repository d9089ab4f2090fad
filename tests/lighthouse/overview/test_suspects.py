from dataclasses import replace

import pytest

from ft_hsdp.analysis.culprits import SETTLED_S
from ft_hsdp.analysis.diagnosis import EVEN_S, Dump, KnownRank, describe
from ft_hsdp.core.traces import GroupTrace, RankId, RankTrace
from lighthouse.overview.suspects import AGAIN_S, QUIET_S, TOO_LONG, Suspects, has_stopped

WAITS, ABSENT = GroupTrace("1:0", 8, 7, "all_gather"), GroupTrace("1:0", 7, 7, "all_gather")
STEP_S = 0.2


def known(rank: int, group: GroupTrace, still_s: float = 3.0) -> KnownRank:
    return KnownRank(1, rank, "gpu7", 40 + rank, 0.3, RankTrace((group,), "trains", ("t.py:3 f",)), still_s)


HUNG = (known(0, WAITS), known(1, ABSENT))


@pytest.fixture
def suspects() -> Suspects:
    return Suspects()


def look(s: Suspects, now: float, quiet_s: float, ranks: tuple[KnownRank, ...] = HUNG) -> list[tuple[str, bool]]:
    found = s.judge(lambda: ranks, quiet_s, STEP_S, now)
    return [(",".join(each.suspects), each.over) for each in found]


def test_a_culprit_is_told_once_two_looks_agree_and_is_over_with_the_next_step(suspects: Suspects) -> None:
    assert look(suspects, 10.0, QUIET_S + 1) == []
    assert look(suspects, 10.0 + AGAIN_S / 2, QUIET_S + 1) == [], "too soon for a second look"
    assert look(suspects, 11.0, QUIET_S + 2) == [("1/1", False)]
    assert look(suspects, 12.0, QUIET_S + 3) == []
    assert look(suspects, 13.0, 0.1) == [("1/1", True)]
    assert look(suspects, 14.0, 0.1) == []


def test_what_only_one_look_finds_is_not_told(suspects: Suspects) -> None:
    other = (known(0, ABSENT), known(1, WAITS))
    assert look(suspects, 10.0, QUIET_S + 1) == []
    assert look(suspects, 11.0, QUIET_S + 2, other) == []
    assert look(suspects, 12.0, QUIET_S + 3, other) == [("1/0", False)]


def test_a_job_has_stopped_when_all_its_ranks_stand_still_or_it_takes_too_long() -> None:
    fresh = (HUNG[0], known(1, ABSENT, SETTLED_S / 2))
    moving = (HUNG[0], replace(HUNG[1], still_s=0.0))
    for ranks, stopped in ((HUNG, True), (fresh, False), (moving, False)):
        assert has_stopped(ranks, QUIET_S + 1, STEP_S) is stopped
        assert not has_stopped(ranks, QUIET_S - 1, STEP_S)
        assert has_stopped(ranks, TOO_LONG * QUIET_S + 1, STEP_S)
    assert not has_stopped(HUNG, QUIET_S + 1, QUIET_S), "a step takes that long"


def test_a_document_says_who_keeps_whom_waiting_and_where_the_culprit_is() -> None:
    dump = Dump("job", 1.7e9, True, 5.0, STEP_S, None, HUNG)
    document = describe(dump)
    (finding,) = document["findings"]
    assert (finding["kind"], finding["waiting"]) == ("absent", 1)
    (suspect,) = finding["suspects"]
    assert (suspect["name"], suspect["host"], suspect["pid"], suspect["stack"]) == (
        "1/1",
        "gpu7",
        41,
        ["t.py:3 f"],
    )
    (wait,) = document["waits"]
    assert (wait["waiting"], wait["absent"], wait["number"]) == (["1/0"], ["1/1"], 8)
    assert describe(replace(dump, pauses={"1": "evaluates"}))["findings"] == []
    assert describe(replace(dump, quiet_s=None))["findings"] == []


def test_after_a_stop_nobody_is_called_slow_for_some_time() -> None:
    ring = GroupTrace("ring 0 of epoch 1", 9, 9, in_s=9.0, left=None)
    names = [(0, 1, 5.0), (1, 0, 0.1)]
    ranks = tuple(
        KnownRank(r, 0, "h", r, 0.3, RankTrace((replace(ring, left=RankId(left, 0), blocked_s=blocked),)))
        for r, left, blocked in names
    )
    dump = Dump("job", 1.7e9, False, 0.1, STEP_S, EVEN_S - 1, ranks)
    assert describe(dump)["findings"] == []
    assert [f["kind"] for f in describe(replace(dump, even_s=EVEN_S))["findings"]] == ["slow link"]


def test_a_document_has_all_ranks_and_the_worst_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    silent, bare = replace(known(2, WAITS), age_s=9.0), replace(known(4, WAITS), trace=None)
    late, ahead = GroupTrace("other", 4, 4), known(5, GroupTrace("other", 5, 4))
    excused = replace(HUNG[0], trace=RankTrace((WAITS, late)))  # it waits elsewhere itself
    ranks = (bare, known(3, late, 0.0), silent, excused, ahead, HUNG[1])
    rows = [
        [1, 1, 3.0, 0.3, "culprit"],
        [1, 2, 3.0, 9.0, "silent"],
        [1, 3, 0.0, 0.3, "absent"],
        [1, 0, 3.0, 0.3, "waits"],
        [1, 5, 3.0, 0.3, "waits"],
        [1, 4, 3.0, 0.3, ""],
    ]
    dump = Dump("job", 1.7e9, True, 5.0, STEP_S, None, ranks)
    assert describe(dump)["ranks"] == rows
    monkeypatch.setattr("ft_hsdp.analysis.diagnosis.MAX_RANKS", 2)
    assert describe(dump)["ranks"] == rows[:2]

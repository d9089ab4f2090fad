"""The timeline: lanes, epochs and failures, as summary.json means them, whatever order rows come in."""

import pickle
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp.analysis.failures import MAX_EPOCHS, MAX_FAILURES
from lighthouse.overview.alarms import Facts
from lighthouse.overview.overview import SHOWN_EPOCHS, JobInfo, JournalEntry, Overview, states
from lighthouse.overview.replicas import MAX_HOSTS, MAX_SEGMENTS, _joined

T = 1000.0


def fold(rows, total=3, ranks=2, live=True):
    timeline = Overview(JobInfo("job", total, ranks, 100, live=live))
    for seq, row in enumerate(rows, 1):
        timeline.add(JournalEntry(seq, "event" if "event" in row else "commit", row))
    return timeline


def ev(t, event, replica=None, **facts):
    if replica is not None:
        facts = {"replica": replica, "incarnation": f"{replica}-a-0", "rank": 0, **facts}
    return {"t": T + t, "event": event, "reason": facts.pop("reason", "why"), **facts}


def commit(t, step, epoch=1, contributors=(0, 1, 2)):
    said = {
        "t": T + t,
        "step": step,
        "epoch": epoch,
        "contributors": list(contributors),
        "total": 3,
        "step_s": 1.0,
    }
    none = dict.fromkeys(("loss", "ftar_s", "lr_scale", "tokens", "ftar_bytes"))
    return {**said, **none, "total": 3, "step_s": 1.0, "waits": {}}


def grant(t, epoch, roles):
    members = sorted(roles)
    told = {str(r): role for r, role in roles.items()}
    return ev(t, "EpochGranted", epoch=epoch, members=members, roles=told, term=5, step=1)


def test_what_the_model_makes_of_the_failures_so_far():
    assert fold([ev(0, "ReplicaStarted", 0)]).effective()["predicted"] is None
    rows = [commit(n, n) for n in range(1, 10)]
    calm = fold(rows).effective()
    assert calm["predicted"] == pytest.approx(calm["with_replay"]) == pytest.approx(1)
    rows += [ev(9.1, "ReplicaExited", 1, kind="SIGKILL"), grant(9.2, 2, {0: "contribute", 2: "contribute"})]
    rows += [commit(10.5 + n, 10 + n, 2, (0, 2)) for n in range(9)]
    rows += [ev(12.5, "ReplicaStarted", 1, incarnation="1-a-1"), commit(19.5, 19, 3)]
    hurt = fold(sorted(rows, key=lambda row: row["t"])).effective()
    assert hurt["with_replay"] == pytest.approx((19 - 9 / 3) / 19.5)
    assert hurt["predicted"] == pytest.approx(hurt["with_replay"], abs=0.01)


def test_a_prediction_counts_all_failures_or_is_none():
    rows = [commit(n, n) for n in range(1, 3 * MAX_FAILURES + 4)]
    for n in range(MAX_FAILURES + 1):
        lives = [f"1-a-{n}", f"1-a-{n + 1}"]
        rows.append(ev(3 * n + 1.1, "ReplicaExited", 1, kind="SIGKILL", incarnation=lives[0]))
        rows.append(ev(3 * n + 1.4, "ReplicaStarted", 1, incarnation=lives[1]))
    rows.sort(key=lambda row: row["t"])
    assert fold(rows).effective()["predicted"] is None
    ended = fold(rows, live=False)
    assert ended.effective()["predicted"] <= 1
    assert ended.predict({}).failures == MAX_FAILURES + 1


def test_the_newest_plan_says_who_keeps_the_shards_of_a_replica_until_it_is_gone():
    plan = ev(2, "CopiesPlanned", 0, hosts=2, keeps={"h1": "0-1", "h2": "3"})
    many = ev(3, "CopiesPlanned", 0, hosts=90, keeps={f"h{i}": "0" for i in range(90)})
    timeline = fold([ev(1, "ReplicaStarted", 0), plan])
    (shown, *_) = states(timeline.lanes.shown())
    assert shown["copies"] == [{"host": "h1", "shards": "0-1"}, {"host": "h2", "shards": "3"}]
    assert shown["copy_hosts"] == 2
    for seq, (row, named, hosts) in enumerate(
        (
            (many, MAX_HOSTS, 90),
            (ev(4, "CopiesPlanned", 0, hosts="x", keeps=["h1"]), 0, 0),
            (plan, 2, 2),
            (ev(5, "ReplicaExited", 0, kind="SIGKILL"), 0, 0),
            (plan, 0, 0),  # of the incarnation that is gone
        ),
        3,
    ):
        timeline.add(JournalEntry(seq, "event", row))
        lane = timeline.lanes.all[0]
        assert (len(lane.copies), lane.copy_hosts) == (named, hosts)


def test_the_model_is_what_the_newest_warm_replica_says():
    timeline = fold([ev(1, "ReplicaWarmed", 0)])
    assert (timeline.model, timeline.parameters) == (None, None)
    for model, parameters, counts in (("own.Net", 12, True), ("own.Net", "many", False), (7, 13, False)):
        warmed = ev(2, "ReplicaWarmed", 0, model=model, parameters=parameters)
        timeline.add(JournalEntry(2, "event", warmed))
        assert ((timeline.model, timeline.parameters) == (model, parameters)) is counts


ALL = {0: "contribute", 1: "contribute", 2: "contribute"}
START = [
    *(ev(0, "ReplicaStarted", r) for r in range(3)),
    *(ev(3, "ReplicaWarmed", r) for r in range(3)),
    grant(4, 1, ALL),
    *(ev(4.1, "GrantAdopted", r, role="contribute", epoch=1) for r in range(3)),
    *(commit(4 + n, n) for n in range(1, 6)),
]


def lane(timeline, replica):
    """[(state, from)] of a lane, in seconds since T."""
    return [(s, round(t0 - T, 3)) for t0, _, s in timeline.segments(0, T + 1e6, 0)[replica]["segments"]]


def killed():
    life = {"incarnation": "1-a-1"}
    return [
        *START,
        ev(9.5, "FailureInjected", 1, kind="SIGKILL", rank=1, reason="chaos"),
        *(ev(9.6, "RingBroken", r, epoch=1, suspect=1, at_rank=1) for r in (0, 2)),
        ev(9.65, "ProcessExited", 1, kind="SIGKILL", rank=1),
        ev(9.7, "ReplicaExited", 1, kind="SIGKILL", rank=1),
        ev(9.71, "ExitReported", 1),
        grant(9.8, 2, {0: "contribute", 2: "contribute"}),
        ev(9.82, "StepRetried", 0),
        commit(10.5, 6, 2, (0, 2)),
        ev(10.6, "ReplicaStarted", 1, **life),
        commit(11.5, 7, 2, (0, 2)),
        ev(10.8, "ReplicaBooted", 1, **life),
        ev(13, "ReplicaWarmed", 1, **life),
        ev(13.5, "CheckedIn", 1, **life),
        grant(14, 3, {0: "contribute", 1: "behind", 2: "contribute"}),
        ev(14.1, "LeftBehind", 1, **life),
        ev(14.2, "FetchStarted", 1, **life),
        ev(14.3, "FetchStarted", 1, **life | {"rank": 1}),
        commit(15, 8, 3, (0, 2)),
        ev(16, "FetchCompleted", 1, **life),
        ev(17, "FetchCompleted", 1, **life | {"rank": 1}),
        grant(18, 4, ALL),
        commit(20, 9, 4),
        ev(20.01, "Rejoined", 1, **life),
    ]


def test_lanes_of_a_replica_that_dies_and_comes_back():
    timeline = fold(killed())
    assert lane(timeline, 1) == [
        ("booting", 0),
        ("warming", 3),
        ("training", 4.1),
        ("down", 9.65),
        ("booting", 10.6),
        ("warming", 13),
        ("behind", 14.1),
        ("fetching", 14.2),
        ("behind", 17),
        ("training", 20),
    ]
    assert lane(timeline, 0)[-3:] == [("training", 4.1), ("retrying", 9.6), ("training", 10.5)]
    one = states(timeline.lanes.settle())[1]
    assert (one["step"], one["incarnation"], one["incarnations"]) == (9, "1-a-1", 2)


def test_a_fetch_ends_although_one_rank_reports_both_ends_before_the_other_reports_any():
    rows = killed()
    began = next(n for n, row in enumerate(rows) if row.get("event") == "FetchStarted" and row["rank"] == 1)
    done = next(n for n, row in enumerate(rows) if row.get("event") == "FetchCompleted" and row["rank"] == 0)
    rows.insert(began, rows.pop(done))
    assert lane(fold(rows), 1) == lane(fold(killed()), 1)


def test_a_failure_has_all_its_phases():
    (failure,) = fold(killed()).told(0, 1e9, 1.0)
    phases = [(p["name"], round(p["t0"] - T, 3), round(p["t1"] - T, 3)) for p in failure["phases"]]
    assert phases == [
        ("detect", 9.5, 9.6),
        ("quorum", 9.6, 9.8),
        ("reconnect", 9.8, 10.5),
        ("boot", 10.6, 10.8),
        ("warm", 10.8, 13),
        ("check_in", 13, 13.5),
        ("fetch", 14.2, 17),
        ("load", 17, 18),
        ("first_step", 18, 20),
    ]
    assert failure["rejoin_s"] == pytest.approx(10.5)
    assert failure["stall_s"] == pytest.approx(0.5), "the commits around it are 1.5 s apart"
    assert (failure["kind"], failure["rank"], failure["cause"], failure["done"]) == ("SIGKILL", 1, "chaos", True)


@given(st.randoms(use_true_random=False), st.sampled_from([0.3, 1.0]))
def test_rows_that_come_late_tell_the_same_failure(random_, late_s):
    rows = killed()
    order = sorted(rows, key=lambda r: r["t"] + random_.uniform(0, late_s))
    (want,), found = fold(rows).told(0, 1e9, 1.0), fold(order).told(0, 1e9, 1.0)
    assert [{**f, "seq": 0} for f in found] == [{**want, "seq": 0}]
    timeline = fold(order)
    assert [s for s, _ in lane(timeline, 1)][-1] == "training"
    for replica in range(3):
        segments = timeline.segments(0, 1e9, 0)[replica]["segments"]
        assert all(t0 < t1 == after for (t0, t1, _), (after, _, _) in pairwise(segments))


def under_torchrun(rows):
    """What is left of rows where a launcher that tells nothing starts and watches the processes."""
    first = [{**row, "event": "ReplicaBooted"} for row in START[:3]]
    untold = ("ReplicaStarted", "ProcessExited", "ReplicaExited", "FailureInjected")
    return [*first, *(row for row in rows if row.get("event") not in untold)]


@pytest.mark.parametrize("late_s", [0, 0.2, 2])
def test_under_torchrun_an_incarnation_that_is_hurt_and_exits_is_lost(late_s):
    rows = under_torchrun(killed())
    timeline = fold(sorted(rows, key=lambda row: row["t"] + late_s * (row.get("event") == "RingBroken")))
    (lost,) = timeline.failures.losses()
    assert (lost.replica, lost.kind, lost.life.incarnation) == (1, "ring broken", "1-a-0")
    assert (lost.t, lost.rejoined) == (T + 9.6, T + 20)
    assert Facts.of(timeline, False, T).failures == ((lost.seq, 1, "ring broken"),)
    assert timeline.effective()["renewal"] is not None
    one = states(timeline.lanes.settle())[1]
    assert (one["incarnation"], one["incarnations"]) == ("1-a-1", 2)


def test_under_torchrun_an_incarnation_that_goes_on_and_ends_later_is_not_lost():
    healed = [ev(9.2, "RingBroken", 0, epoch=1, suspect=1), grant(9.4, 2, ALL), commit(10, 6, 2)]
    timeline = fold([*under_torchrun(START), *healed, *(ev(30, "ExitReported", r) for r in range(3))])
    assert (timeline.failures.losses(), timeline.effective()["renewal"]) == ([], None)


def test_a_stop_that_nobody_noticed_is_no_failure_and_one_that_broke_the_ring_is():
    stop = ev(9.2, "FailureInjected", 1, kind="SIGSTOP", for_s=0.3)
    lifted = ev(9.5, "FailureLifted", 1, kind="SIGSTOP")
    assert fold([*START, stop, lifted, commit(10, 6)]).told(0, 1e9, 1.0) == []
    seen = [stop, ev(10.3, "RingBroken", 0, epoch=1, suspect=1), grant(10.5, 2, ALL), lifted, commit(11, 6, 2)]
    (failure,) = fold([*START, *seen]).told(0, 1e9, 1.0)
    assert (failure["kind"], failure["replica"], failure["done"]) == ("SIGSTOP", 1, True)
    assert failure["rejoin_s"] == pytest.approx(1.8)


def test_a_ring_that_breaks_without_an_exit_is_told_once():
    broken = [ev(9.2, "RingBroken", r, epoch=1, suspect=s) for r, s in ((0, 1), (2, 1), (1, 0))]
    (failure,) = fold([*START, *broken, grant(9.4, 2, ALL), commit(10, 6, 2)]).told(0, 1e9, 1.0)
    assert (failure["kind"], failure["replica"]) == ("ring broken", 1)
    assert failure["detect_s"] is None, "nobody knows since when it hung"
    assert [p["name"] for p in failure["phases"]] == ["quorum", "reconnect"]


@pytest.mark.parametrize(
    ("later", "kind", "done"),
    [
        (
            [ev(30, "RingBroken", 2, epoch=2, suspect=1), grant(30.2, 3, ALL), commit(31, 7, 3)],
            "ring broken",
            True,
        ),
        ([ev(30, "ReplicaExited", 1, kind="exit 1"), commit(31, 7, 2)], "exit 1", False),
    ],
)
def test_a_replica_whose_ring_broke_long_ago_has_failed_again(later, kind, done):
    first = [ev(9.2, "RingBroken", 0, epoch=1, suspect=1), grant(9.4, 2, ALL), commit(10, 6, 2)]
    found = fold([*START, *first, *later]).told(0, 1e9, 1.0)
    told = [(f["replica"], f["kind"], round(f["t"] - T, 3), f["done"]) for f in found]
    assert told == [(1, "ring broken", 9.2, True), (1, kind, 30.0, done)]


def test_what_a_contribution_has_disproved_is_not_believed_later():
    late = [ev(8.5, "StepRetried", 0), ev(8.6, "LeftBehind", 1), ev(8.7, "GrantAdopted", 2, role="behind")]
    timeline = fold([*START, *late])
    assert [one.state for one in timeline.lanes.settle()] == ["training"] * 3


def test_a_replica_that_stands_by_is_shown_so_until_it_contributes():
    roles = {0: "contribute", 1: "standby", 2: "contribute"}
    timeline = fold(
        [
            *START,
            ev(9.1, "RingBroken", 1, epoch=1),
            grant(9.2, 2, roles),
            ev(9.3, "GrantAdopted", 1, role="standby", epoch=2),
            ev(9.4, "StepRetried", 1),
            commit(10, 6, 2, (0, 2)),
            ev(20, "ReplicaStalled", 1),
            ev(22, "ReplicaStalled", 1, over=True),
            commit(23, 7, 2, (0, 2)),
            ev(24, "GrantAdopted", 1, role="contribute", epoch=3),
            commit(25, 8, 3),
        ]
    )
    assert lane(timeline, 1)[2:] == [
        ("training", 4.1),
        ("retrying", 9.1),
        ("standby", 9.3),
        ("stalled", 20),
        ("standby", 22),
        ("training", 24),
    ]


def test_a_failure_is_over_when_its_replica_stands_by():
    rows = [row for row in killed() if row.get("epoch") != 4 and row.get("event") != "Rejoined"]
    rows += [grant(18, 4, {0: "contribute", 1: "standby", 2: "contribute"}), commit(20, 9, 4, (0, 2))]
    (failure,) = fold(rows).told(0, 1e9, 1.0)
    assert failure["done"]
    assert failure["rejoin_s"] == pytest.approx(10.5)


def test_an_end_on_purpose_is_no_failure():
    end = [ev(12, "ProcessExited", 1, kind="SIGTERM"), ev(12.1, "ReplicaExited", 1, kind="stopped")]
    ended = fold([*START, *end])
    assert (ended.told(0, 1e9, 1.0), ended.effective()["renewal"]) == ([], None)
    assert fold([*START, end[1], end[0]]).told(0, 1e9, 1.0) == []
    done = [ev(12, "ProcessExited", 1, kind="exit 0"), ev(12.1, "ReplicaExited", 1, kind="done")]
    timeline = fold([*START, *done])
    assert timeline.told(0, 1e9, 1.0) == []
    assert timeline.lanes.all[1].state == "final"


def test_a_replica_that_dies_again_while_it_boots_has_two_failures_that_end_together():
    rows = killed()
    at = next(n for n, row in enumerate(rows) if row.get("event") == "ReplicaWarmed" and row["t"] > T + 10)
    again = [
        ev(12, "ReplicaExited", 1, kind="exit 1", incarnation="1-a-1"),
        ev(12.5, "ReplicaStarted", 1, incarnation="1-a-2"),
    ]
    later = [{**r, "incarnation": "1-a-2"} if r.get("incarnation") == "1-a-1" else r for r in rows[at:]]
    first, second = fold([*rows[:at], *again, *later]).told(0, 1e9, 1.0)
    assert (first["kind"], second["kind"]) == ("SIGKILL", "exit 1")
    assert first["rejoin_s"] == pytest.approx(10.5)
    assert second["rejoin_s"] == pytest.approx(8)
    assert "quorum" not in {p["name"] for p in second["phases"]}, "it was no member: nobody had to be told"


def test_words_of_an_incarnation_that_is_gone_change_nothing():
    rows = [*killed(), ev(21, "RingBroken", 1, epoch=1, suspect=0), ev(21, "FetchStarted", 1)]
    timeline = fold([*rows, ev(21, "ReplicaBooted", 1, incarnation="1-b-0")])  # replaced before it had started
    assert lane(timeline, 1)[-1] == ("training", 20)
    assert timeline.lanes.all[1].incarnation == "1-a-1"


def test_stalled_drained_dead_and_excluded():
    timeline = fold(
        [*START, ev(10, "ReplicaStalled", 0, reason="no beat"), ev(12, "ReplicaStalled", 0, over=True)]
    )
    assert lane(timeline, 0)[-2:] == [("stalled", 10), ("training", 12)]
    timeline = fold(
        [*START, ev(10, "OperatorOrdered", 0, order="drain"), ev(11, "ReplicaExited", 0, kind="stopped")]
    )
    assert lane(timeline, 0)[-1] == ("drained", 11)
    assert timeline.lanes.all[0].drained
    assert fold([*START, ev(10, "ReplicaLost", 0)]).lanes.all[0].state == "dead"
    timeline = fold([*START, ev(10, "ReplicaExcluded", 0)])
    assert lane(timeline, 0)[-1] == ("stalled", 10)
    assert timeline.told(0, 1e9, 1.0)[0]["kind"] == "silent"


def test_a_lighthouse_that_starts_tells_whom_it_wants():
    """The rows of old orders are gone: by the configuration all are wanted."""
    away = [ev(10, "ReplicaExited", 2, kind="stopped"), ev(11, "LighthouseStarted", target=2, drained=[0])]
    timeline = fold(away)
    assert timeline.lanes.target == 2
    assert [(r["replica"], r["state"], r["drained"]) for r in states(timeline.lanes.shown())] == [
        *((0, "drained", True), (1, "down", False), (2, "drained", False))
    ]
    back = fold([*away, ev(12, "LighthouseStarted", target=3, drained=[])])
    assert {lane.state for lane in back.lanes.all} == {"down"}
    older = fold([*away, ev(12, "LighthouseStarted", term=5)])
    assert (older.lanes.target, older.lanes.all[0].drained) == (2, True), "of a version that does not tell"


def test_job_and_lighthouse():
    up = ev(0, "LighthouseStarted", term=5, epoch=0)
    again = ev(15, "LighthouseStarted", term=6, epoch=1)
    timeline = fold([up, *START, ev(12, "LighthouseExited"), again, ev(20, "JobFinished")])
    assert timeline.outages == [[T + 12, T + 15]]
    assert (timeline.term, timeline.epoch, timeline.since) == (6, 1, T + 15)
    assert (timeline.finished, timeline.started, timeline.ended) == (True, T, T + 20)
    late = fold([up, *START, again, ev(12, "LighthouseExited")])
    assert late.outages == [[T + 12, T + 15]], "its supervisor tells of the exit afterwards"
    halted = [up, *START, ev(14, "JobHalted", reason="no copy is left"), grant(14.5, 2, {0: "contribute"})]
    assert fold(halted).halted == "no copy is left", "the job is halted while a ring still forms"
    resumed = fold([*halted, again, grant(16, 3, {0: "contribute", 1: "contribute"})])
    assert (resumed.halted, resumed.ended) == ("", None)


def test_everything_is_bounded():
    rows = []
    for n in range(MAX_EPOCHS + 500):
        roles = ALL if n % 2 else {0: "contribute", 2: "contribute"}
        life = {"incarnation": f"1-a-{n // 2}"}
        rows.append(grant(10 * n, n + 1, roles))
        rows.append(
            ev(10 * n + 1, *(("ReplicaStarted", 1) if n % 2 else ("ReplicaExited", 1)), kind="exit 1", **life)
        )
        rows.append(commit(10 * n + 5, n + 1, n + 1, roles))
    timeline = fold(rows)
    assert len(timeline.failures.epochs) == MAX_EPOCHS
    assert len(timeline.failures.all) == MAX_FAILURES
    assert len(timeline.epochs(0, 1e9)) == SHOWN_EPOCHS
    assert all(len(lane.segments) <= MAX_SEGMENTS for lane in timeline.lanes.all)
    assert len(pickle.dumps(timeline)) < 3 << 19


def test_short_segments_are_joined_and_the_worst_stays():
    segments = [(0.0, 100.0, "training"), (100.0, 101.0, "retrying"), (101.0, 200.0, "training")]
    assert _joined(segments, 5.0) == [(0.0, 200.0, "training")]
    assert _joined(segments, 0.5) == segments
    some = [(0.0, 100.0, "training"), (100.0, 101.0, "down"), (101.0, 102.0, "booting"), (102.0, None, "training")]
    assert _joined(some, 5.0) == [(0.0, 100.0, "training"), (100.0, 102.0, "down"), (102.0, None, "training")]


@given(st.lists(st.tuples(st.floats(0.01, 10), st.sampled_from(["training", "down", "retrying", "booting"]))))
def test_a_lane_that_is_joined_covers_the_same_time(parts):
    segments, t = [], 0.0
    for length, state in parts:
        segments.append((t, t + length, state))
        t += length
    joined = _joined(segments, 3.0)
    assert not segments or (joined[0][0], joined[-1][1]) == (0.0, t)
    assert all(a[1] == b[0] for a, b in pairwise(joined))

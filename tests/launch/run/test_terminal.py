import io
import os
import re
from typing import Any

import pytest

from ft_hsdp.config import parse
from ft_hsdp.event_table import tell
from ft_hsdp.launch.run.terminal import Terminal, step_line, summary_lines
from ft_hsdp.lifetime import forgiving
from tests.support.launch.launch_rows import commit, event, fed, summarize

CONFIG = parse({"ranks_per_replica": 1, "train": {"steps": 5}})


def shown(live: bool = False, width: int = 80) -> tuple[Terminal, io.StringIO]:
    out = io.StringIO()
    return Terminal(CONFIG, out, live=live), out


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("lost", ["reader", "closed", "full"])
def test_output_that_is_lost_ends_nothing(lost: str, live: bool) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    descriptor = os.open("/dev/full", os.O_WRONLY) if lost == "full" else writer
    terminal = Terminal(CONFIG, forgiving(descriptor), live=live)
    if lost == "closed":
        os.close(descriptor)
    with terminal:
        for step in range(1, 6):
            terminal.commit(commit(step))
    terminal.say("the last word")


def test_a_step_is_one_plain_line_of_80_columns() -> None:
    terminal, out = shown()
    with terminal:
        terminal.commit(commit(3, who=[0, 2], epoch=12, lr_scale=0.8165, tokens=3072, step_s=0.6123))
    line = out.getvalue().rstrip("\n")
    for part in ("step 3/5", "loss 2.9700", "healthy 2/3", "lr x0.82", "5017 tok/s"):
        assert part in line
    big = commit(99999, epoch=1234, loss=10.5, tokens=10**9, step_s=123.45)
    assert len(step_line(big, 99999)) <= 90


def test_a_line_shows_the_units_of_a_step_where_they_do_not_follow_from_the_contributors() -> None:
    config = parse({"ranks_per_replica": 1, "train": {"steps": 5}, "quorum": {"batch": "constant"}})
    out = io.StringIO()
    Terminal(config, out, live=False).commit(
        commit(3, who=[0, 2], units=9, units_wanted=9, tokens=3072, step_s=0.6)
    )
    line = out.getvalue().rstrip("\n")
    assert "units 9/9" in line


def test_a_replica_that_stood_by_until_now_does_not_contribute_again() -> None:
    terminal, out = shown()
    for step, who in enumerate(([0, 1], [1, 2], [0, 1, 2]), 1):
        terminal.commit(commit(step, who=who))
    lines = [x.split(" ", 1)[1] for x in out.getvalue().splitlines() if not x.startswith("step")]
    assert [(line[:9], "again" in line) for line in lines] == [("replica 2", False), ("replica 0", True)]


def test_a_failure_is_told_with_the_times_since_it_began() -> None:
    terminal, out = shown()
    one = {"replica": 1, "incarnation": "1-a-0"}
    with terminal:
        terminal.event(event("FailureInjected", 100.0, kind="SIGKILL", rank=1, pid=7, **one))
        terminal.event(event("RingBroken", 100.004, replica=0, suspect=1, epoch=3))
        terminal.event(event("RingBroken", 100.005, replica=2, suspect=1, epoch=3))
        terminal.event(event("ProcessExited", 100.010, kind="SIGKILL", rank=1, pid=7, **one))
        terminal.event(event("CheckedIn", 102.0, **one))
        done = {"seconds": 0.5, "bytes": 8_000_000, "step": 9, "rank": 0, **one}
        terminal.event(event("FetchCompleted", 103.0, donor=2, **done))
        terminal.commit(commit(9, t=103.2, who=[0, 2]))
        terminal.commit(commit(10, t=103.5))
        terminal.event(event("ProcessExited", 110.0, kind="exit 0", rank=0, pid=8, replica=0))
    lines = [x.split(" ", 1)[1] for x in out.getvalue().splitlines() if not x.startswith("step")]
    since = [re.findall(r"\(\+(\S+) s\)", line) for line in lines]
    assert since == [[], ["0.004"], ["0.010"], ["3.000"], ["3.500"]]


def test_an_event_about_a_later_step_comes_after_the_line_of_the_step_before_it() -> None:
    terminal, out = shown()
    terminal.commit(commit(1))
    terminal.event(event("EpochGranted", 100.0, epoch=2, step=3, members=[0, 2]))
    terminal.tick(101.0)
    terminal.commit(commit(2))
    terminal.event(event("EpochGranted", 102.0, epoch=3, step=5, members=[0, 2]))
    assert "epoch 3" not in out.getvalue()
    terminal.tick(105.0)  # the commits before it do not come: it is not held for ever
    lines = [re.sub(r"^[0-9:]{8} ", "", line)[:7] for line in out.getvalue().splitlines()]
    assert lines == ["step 1/", "step 2/", "epoch 2", "epoch 3"]


def test_a_rank_that_was_told_to_leave_is_not_told_as_a_loss() -> None:
    terminal, out = shown()
    gone = {"kind": "exit 143", "rank": 1, "pid": 7}
    terminal.event(event("LeaveRequested", 1.0, replica=2))
    terminal.event(event("ProcessExited", 2.0, replica=2, incarnation="2-a-0", **gone))
    assert "gone" not in out.getvalue()
    terminal.event(event("ProcessExited", 2.0, replica=1, incarnation="1-a-0", **gone))
    assert "is gone: exit 143" in out.getvalue()


def test_a_wait_is_only_shown_when_it_is_long_and_still_goes_on() -> None:
    terminal, out = shown()
    for end in (event("EpochGranted", 101.0, epoch=1, step=1, members=[0, 1]), None):
        terminal.event(event("Waiting", 100.0))
        terminal.tick(102.0)
        assert "waits" not in out.getvalue()
        if end is not None:
            terminal.event(end)
    for now in (104.0, 105.0):
        terminal.tick(now)
    assert out.getvalue().count("waits") == 1


@pytest.mark.parametrize("fields", [{}, {"replica": None}, {"replica": "[red]"}, {"seconds": "x", "replica": 1}])
def test_no_event_breaks_the_view(fields: dict[str, Any]) -> None:
    terminal, _ = shown()
    for name in ("FetchCompleted", "EpochGranted", "FailureInjected", "RingBroken", "NoSuchEvent"):
        terminal.event({**event(name, 1.0), **fields})
        assert tell({**event(name, 1.0), **fields})


def test_the_summary_says_how_it_ended() -> None:
    rows = [commit(n) for n in range(1, 6)]
    finals = {r: {"step": 5, "lineage": "L5", "digest": "abc", "commit_epoch": 1} for r in range(3)}
    terminal, out = shown()
    terminal.summary(summarize(CONFIG, rows, fed(rows), finals, []), 0)
    text = out.getvalue()
    assert "3 replicas equal" in text
    assert "15 trained" in text
    assert all(line == line.rstrip() for line in text.splitlines())
    del finals[2]
    terminal.summary(summarize(CONFIG, rows, fed(rows), finals, []), 0)
    assert "digest abc, 1 away" in out.getvalue()
    finals[1]["digest"] = "other"
    terminal.summary(summarize(CONFIG, rows, fed(rows), finals, [], [1]), 75)
    assert "2 different states" in out.getvalue()
    finals[1] |= {"step": 2, "lineage": "L2"}
    terminal.summary(summarize(CONFIG, rows, fed(rows), finals, []), 0)
    assert "digest abc, 2 away" in out.getvalue(), "one had left before"
    assert "replicas 1" in out.getvalue()
    terminal.summary(summarize(CONFIG, rows[:3], fed(rows[:3]), {}, []), 130)
    assert "step 3 of 5" in out.getvalue()


def test_many_failures_show_their_spread() -> None:
    one = {"kind": "SIGKILL", "replica": 1, "rank": 0, "rejoin_s": 2.0, "stall_s": 0.0, "t": 1.0, "source": ""}
    summary: dict[str, Any] = {
        "steps": 9,
        "loss_first": 2.0,
        "loss_last": 1.0,
        "wall_s": 9.0,
        "effective_training_ratio": 0.9,
        "replicas": {},
        "batches": {"trained": 9, "duplicated": 0, "skipped": 0},
        "failures": [{**one, "detect_s": 0.01 * n} for n in range(1, 11)],
    }
    lines = dict(summary_lines(summary))
    assert lines["seen after"].startswith("p50 0.055 s")
    assert lines["back after"].endswith("(10)")
    for failure in summary["failures"]:
        failure["back"] = False  # its time is that to the end of the run
    summary |= {"loss_first": 0.0, "loss_last": 0.0}
    lines = dict(summary_lines(summary))
    assert (lines["back after"], lines["loss"]) == ("unknown", "none was told")
    summary["failures"] = summary["failures"][:2]
    assert "seen after" not in dict(summary_lines(summary))

from pathlib import Path

import pytest

from ft_hsdp.core.checkpoint import MAX_RETRIES
from ft_hsdp.core.effects import RequestGrant
from ft_hsdp.core.events import RingBroken
from ft_hsdp.core.replica import transition
from ft_hsdp.core.restart import REFILL_STEPS
from ft_hsdp.core.voting import MAX_ATTEMPTS, MAX_SKIPS
from tests.support.core.transcript import FOLDER, Driver, replay

TRANSCRIPTS = sorted(FOLDER.glob("*.txt"))


def driven(*lines: str) -> Driver:
    """A replica to which these lines have happened."""
    driver = Driver()
    for line in lines:
        driver.feed(line)
    return driver


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda p: p.stem)
def test_transcript(path: Path) -> None:
    expected = path.read_text()
    assert replay(expected).rstrip("\n") == expected.rstrip("\n")


def test_a_transcript_that_is_not_true_is_noticed() -> None:
    text = "replica me=0 steps=2\n----\nask for step 9: holds zero\n= asking on zero, no ring\n"
    assert "ask for step 1: holds zero" in replay(text)
    assert replay(text).rstrip("\n") != text.rstrip("\n")


def test_whoever_is_done_does_nothing_more() -> None:
    driver = driven("replica me=0 steps=2", "refused code=75")
    for line in ("grant epoch=1 base=zero members=0,1", "finish", "leave", "unanswered"):
        assert driver.feed(line) == ["= done on zero, no ring"]


def test_attempts_on_one_ring_are_bounded() -> None:
    driver = driven("replica me=0 steps=2", "grant epoch=1 base=zero members=0,1")
    attempts = 0
    while driver.me.intact:
        attempts += 1
        assert attempts <= MAX_ATTEMPTS
        driver.feed("reduced")
        driver.feed("token pass1 no")
    assert attempts == MAX_ATTEMPTS


def test_a_checkpoint_that_takes_each_of_its_writers_along_is_given_up() -> None:
    driver = Driver()
    driver.feed("replica me=9 steps=99 every=50")
    members = [*range(10)]
    driver.feed("grant epoch=1 base=zero members=" + ",".join(map(str, members)))
    written = []
    for step in range(1, 51 + 2 * MAX_RETRIES):
        driver.feed("reduced")
        others = ",".join(str(m) for m in members)
        asked = any("checkpoint" in said for said in driver.feed("token pass1 yes") if "send token" in said)
        driver.feed(f"token verdict yes equal={others}" + (f" checkpoint={step}" if asked else ""))
        fence, base = driver.me.fence, next(n for n, s in driver.states.items() if s == driver.me.state)
        if driver.me.writers:
            written.append(step)
            members.remove(driver.me.writers[0][0])  # the writer dies
            driver.feed(f"broken epoch={fence.epoch} suspect=0")
            said = ",".join(str(m) for m in members)
            driver.feed(f"grant epoch={fence.epoch + 1} base={base} members={said}")
        else:
            driver.feed(f"continue epoch={fence.epoch} step={step + 1}")
    assert written == [*range(50, 51 + MAX_RETRIES)]


def test_a_job_that_only_skips_ends_before_its_restarts_are_refilled() -> None:
    assert MAX_SKIPS < REFILL_STEPS
    driver = driven("replica me=0 steps=99", "grant epoch=1 base=zero members=0")
    said: list[str] = []
    for step in range(1, MAX_SKIPS + 1):
        said = driver.feed("reduced poisoned=0")
        driver.feed(f"continue epoch=1 step={step + 1}")
    assert said[-2].startswith(f"exit 75: {MAX_SKIPS} steps")


def test_a_finite_step_in_between_starts_the_count_anew() -> None:
    driver = driven("replica me=0 steps=99", "grant epoch=1 base=zero members=0")
    for step in range(1, 3 * MAX_SKIPS):
        driver.feed("reduced" if step % MAX_SKIPS == 0 else "reduced poisoned=0")
        driver.feed(f"continue epoch=1 step={step + 1}")
    assert driver.me.intact
    assert driver.me.state.step == 3 * MAX_SKIPS - 1


@pytest.mark.parametrize(
    ("suspect", "accuser", "edge"), [(1, 2, (2, 1)), (1, None, None), (1, 1, None), (None, None, None)], ids=str
)
def test_a_report_says_who_blames_whom_until_the_next_ring(suspect, accuser, edge) -> None:
    """Who names itself, because it has no descriptor left, speaks of no edge."""
    driver = driven("replica me=0 steps=2", "grant epoch=1 base=zero members=0,1,2")
    after, due = transition(driver.me, RingBroken(1, suspect, accuser))
    assert [e.report.edge for e in due if isinstance(e, RequestGrant)] == [edge]
    driver.replica = after
    driver.feed("grant epoch=2 base=zero members=0,1,2")
    _, due = transition(driver.me, RingBroken(2))
    assert [e.report.edge for e in due if isinstance(e, RequestGrant)] == [None]

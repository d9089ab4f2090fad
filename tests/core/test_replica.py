from __future__ import annotations

from pathlib import Path

import pytest
from transcript import FOLDER, Driver, replay

from ft_hsdp.core.replica import MAX_ATTEMPTS

TRANSCRIPTS = sorted(FOLDER.glob("*.txt"))


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda p: p.stem)
def test_transcript(path: Path) -> None:
    expected = path.read_text()
    assert replay(expected).rstrip("\n") == expected.rstrip("\n")


def test_there_are_transcripts_and_each_is_about_something() -> None:
    assert len(TRANSCRIPTS) >= 15
    for path in TRANSCRIPTS:
        text = path.read_text()
        assert text.startswith("# "), f"{path.name} has no title"
        assert text.count("----") >= 3, f"{path.name} shows nothing"


def test_a_transcript_that_is_not_true_is_noticed() -> None:
    text = "replica me=0 steps=2\n----\nask for step 9: holds zero\n= asking on zero, no ring\n"
    assert "ask for step 1: holds zero" in replay(text)
    assert replay(text).rstrip("\n") != text.rstrip("\n")


def test_whoever_is_done_does_nothing_more() -> None:
    driver = Driver()
    driver.feed("replica me=0 steps=2")
    driver.feed("refused code=75")
    for line in ("grant epoch=1 base=zero members=0,1", "finish", "leave", "unanswered"):
        assert driver.feed(line) == ["= done on zero, no ring"]


def test_attempts_on_one_ring_are_bounded() -> None:
    driver = Driver()
    driver.feed("replica me=0 steps=2")
    driver.feed("grant epoch=1 base=zero members=0,1")
    attempts = 0
    while driver.me.intact:
        attempts += 1
        assert attempts <= MAX_ATTEMPTS
        driver.feed("reduced")
        driver.feed("token pass1 no")
    assert attempts == MAX_ATTEMPTS

import os
from typing import Any
from unittest import mock

import pytest

from ft_hsdp.control import watchdog
from ft_hsdp.control.watchdog import PERIOD_S, Limits, Watchdog

LIMITS = Limits(silence_s=15.0, step_s=100.0, leave_s=10.0)


class Rank:
    """A watchdog whose time and timers are the test's; it looks every PERIOD_S."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, siblings: tuple[int, ...] = (), parent: int | None = None):
        self.now = 1000.0
        self.progress: int | None = 0
        self.said = self.left = 0
        self.ended: list[str] = []
        self._due: list[tuple[float, Any]] = []
        loop = mock.Mock()
        loop.call_soon.side_effect = lambda then: self._due.append((self.now, then)) or mock.Mock()
        loop.call_later.side_effect = lambda s, then: self._due.append((self.now + s, then)) or mock.Mock()
        monkeypatch.setattr(watchdog.asyncio, "get_running_loop", lambda: loop)
        monkeypatch.setattr(watchdog.time, "monotonic", lambda: self.now)
        self.watchdog = Watchdog(LIMITS, self, parent)
        self.watchdog.expect(siblings)

    def say_alive(self) -> None:
        self.said += 1

    def main_progress(self) -> int | None:
        return self.progress

    def leave(self) -> None:
        self.left += 1

    def end(self, reason: str) -> None:
        self.ended.append(reason)

    def run(self, seconds: float, *, heard: tuple[int, ...] = (), works: bool = False) -> None:
        """So much time passes; ``heard`` say something all the time, and the trainer ``works``."""
        end = self.now + seconds
        while self._due and self._due[0][0] <= end and not self.ended:
            self.now, tick = max(self.now, self._due[0][0]), self._due.pop(0)[1]
            for rank in heard:
                self.watchdog.heard(rank)
            if works:
                assert self.progress is not None
                self.progress += 1
            tick()
        self.now = max(self.now, end)

    def stand_still(self, seconds: float) -> None:
        self.now += seconds


def test_a_sibling_that_falls_silent_ends_the_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, siblings=(1, 2))
    rank.run(60.0, heard=(1, 2), works=True)
    assert not rank.ended
    assert rank.said >= 60 / PERIOD_S
    rank.run(14.0, heard=(1,), works=True)
    assert not rank.ended
    rank.run(2.0, heard=(1,), works=True)
    assert [why.split(" of ")[0] for why in rank.ended] == ["rank 2"]


def test_who_stood_still_suspects_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, siblings=(1,))
    rank.run(5.0, heard=(1,))
    rank.stand_still(500.0)
    rank.run(5.0, heard=(1,), works=True)
    assert not rank.ended


def test_a_trainer_that_does_not_get_on_ends_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    rank.run(1000.0, works=True)
    rank.run(99.0)
    assert not rank.ended
    rank.run(2.0)
    assert rank.ended[0].startswith("the trainer hangs")


def test_a_trainer_that_waits_for_an_order_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    rank.progress = None
    rank.run(5000.0)
    assert not rank.ended


def test_an_orphan_leaves_and_ends_if_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    cared_for, orphan = Rank(monkeypatch, parent=os.getppid()), Rank(monkeypatch, parent=2**22)
    for rank in (cared_for, orphan):
        rank.run(5.0, works=True)
        assert not rank.ended
    assert (cared_for.left, orphan.left) == (0, 1)
    for rank in (cared_for, orphan):
        rank.run(6.0, works=True)
    assert (len(cared_for.ended), len(orphan.ended)) == (0, 1)

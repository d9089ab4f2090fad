from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from ft_hsdp import fault_injection
from ft_hsdp.config import FailpointConfig, parse

POINTS = parse({}, ["--debug.failpoints={vote: {replicas: [0, 2], rank: 1, life: 1, step: 5, signal: STOP}}"])


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    numbers: list[int] = []

    def kill(thread: int, number: int) -> None:
        assert thread == threading.get_ident()
        numbers.append(number)

    monkeypatch.setattr(signal, "pthread_kill", kill)
    yield numbers
    fault_injection.arm({}, 0, 0, 0)


@pytest.mark.parametrize(("replica", "rank", "life"), [(0, 1, 1), (2, 1, 1)])
def test_it_fires_once_at_its_step_or_the_first_time_after_it(
    sent: list[int], replica: int, rank: int, life: int
) -> None:
    fault_injection.arm(POINTS.debug.failpoints, replica, rank, life)
    fault_injection.reach("vote", 4)
    fault_injection.reach("apply-end", 9)
    assert sent == []
    fault_injection.reach("vote", 7)
    assert sent == [signal.SIGSTOP]
    fault_injection.reach("vote", 8)
    assert sent == [signal.SIGSTOP]


@pytest.mark.parametrize(("replica", "rank", "life"), [(1, 1, 1), (0, 0, 1), (0, 1, 0), (0, 1, 2)])
def test_others_are_left_alone(sent: list[int], replica: int, rank: int, life: int) -> None:
    fault_injection.arm(POINTS.debug.failpoints, replica, rank, life)
    fault_injection.reach("vote", 5)
    assert sent == []


def test_a_place_can_only_say_that_it_is_hit(sent: list[int]) -> None:
    fault_injection.arm({"record-lost": FailpointConfig(replicas=(0,), step=5)}, 0, 0, 0)
    assert not fault_injection.hit("record-lost", 4)
    assert fault_injection.hit("record-lost", 5)
    assert not fault_injection.hit("record-lost", 5)
    assert sent == []

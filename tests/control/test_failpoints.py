from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest

from ft_hsdp.control.failpoints import Failpoints
from ft_hsdp.core.assignment import Grant, Member
from ft_hsdp.core.commit import Fence, Token
from ft_hsdp.core.lineage import StateId
from ft_hsdp.core.replica import Phase, Replica, RingBroken, Started
from ft_hsdp.errors import ConfigError

STATE = StateId(1, 4, "0" * 32)
GRANT = Grant(1, 1, STATE, (Member(0, "0-x-0", "contribute"), Member(1, "1-x-0", "contribute")), 2, "")
AT = {"replicas": [0, 2], "step": 5}


def token(step: int, verdict: bool = True) -> Token:
    return Token(Fence(1, step, 0), verdict, True, "0" * 32)


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    sent: list[int] = []

    def kill(pid: int, number: int) -> None:
        assert pid == os.getpid()
        sent.append(number)

    monkeypatch.setattr(os, "kill", kill)
    return sent


def test_it_fires_once_at_its_step_with_the_verdict(stopped: list[int]) -> None:
    failpoints = Failpoints({"verdict.stop": AT}, 0)
    for sent in (token(4), token(6), token(5, verdict=False)):
        failpoints.verdict(sent)
    assert stopped == []
    failpoints.verdict(token(5))
    failpoints.verdict(token(5))
    assert stopped == [signal.SIGSTOP]


def test_other_replicas_and_other_runs_are_left_alone(stopped: list[int]) -> None:
    Failpoints({"verdict.stop": AT}, 1).verdict(token(5))
    Failpoints({}, 0).verdict(token(5))
    assert stopped == []


def test_the_record_is_lost_when_the_ring_of_its_step_breaks() -> None:
    prepared = Replica(0, "0-x-0", 9, STATE, STATE, phase=Phase.VOTED, grant=GRANT, intact=True, forwarded=True)
    failpoints = Failpoints({"record.lost": AT}, 2)
    assert failpoints.record_lost(prepared, Started()) is prepared
    assert failpoints.record_lost(replace(prepared, forwarded=False), RingBroken(1)).forwarded is False
    other = replace(prepared, head=replace(STATE, step=7))
    assert failpoints.record_lost(other, RingBroken(1)) is other
    assert failpoints.record_lost(prepared, RingBroken(1)) == replace(prepared, forwarded=False, record=None)
    assert failpoints.record_lost(prepared, RingBroken(1)) is prepared


def test_an_unknown_name_is_the_users_error() -> None:
    with pytest.raises(ConfigError, match=r"debug.failpoints.no.such: .*verdict.stop"):
        Failpoints({"no.such": AT}, 0)

from __future__ import annotations

import pytest

from ft_hsdp.train.identity import FromEnvironment, RankCall


def test_under_torchrun_everything_is_known_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "abc")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    calling = FromEnvironment(3)
    assert calling.heard() == calling.wait() == RankCall(3, "abc", 2)
    assert calling.wait().lives == ("3-abc-0", "3-abc-1", "3-abc-2")


def test_without_torchrun_it_is_the_first_incarnation_of_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    assert FromEnvironment(0).wait().lives == ("0-run-0",)

from __future__ import annotations

import pytest

from ft_hsdp.core.incarnation import IncarnationId
from ft_hsdp.train.identity import FromEnvironment


def test_under_torchrun_everything_is_known_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "abc")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    calling = FromEnvironment(3)
    assert calling.poll() == calling.wait() == IncarnationId(3, "abc", 2)
    assert str(calling.wait()) == "3-abc-2"


def test_without_torchrun_it_is_the_first_incarnation_of_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    assert str(FromEnvironment(0).wait()) == "0-run-0"

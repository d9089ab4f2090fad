"""With which state a replica comes when its host's agent dies after it has said what it keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ft_hsdp.core.state_id import StateId
from ft_hsdp.jsonl import Journal
from ft_hsdp.state.agent.slots import CompleteSnapshot as Kept
from ft_hsdp.train import checkpointing as module
from ft_hsdp.train.checkpointing import Checkpoints, restore

KEPT = StateId(3, 40, "a" * 32)
WRITTEN = StateId(2, 20, "b" * 32)


class Alone:
    rank = 0

    def gather(self, mine: bytes) -> list[bytes]:
        return [mine]


class Keeper:
    """Its agent answers once, and is gone then."""

    def list(self) -> tuple[Kept, ...]:
        return (Kept(KEPT, settled=True),)

    def acquire(self, state: StateId) -> None:
        return None

    def release_taken(self) -> None:
        pass


class Held:
    state = StateId(0, 0, "0" * 32)


@pytest.mark.parametrize("current", [True, False])
def test_a_checkpoint_is_taken_if_the_agent_dies_between_its_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, current: bool
) -> None:
    looked: list[Path] = []

    def resume(held: Any, ranks: object, checkpoints: Checkpoints, journal: object) -> None:
        looked.append(checkpoints.folder)
        held.state = WRITTEN

    monkeypatch.setattr(module, "_resume", resume)
    held: Any = Held()
    ranks: Any = Alone()
    keeper: Any = Keeper()
    checkpoints = Checkpoints(tmp_path, "hash", 1, lambda ledger: ledger, None)
    restore(held, keeper, ranks, checkpoints, current, Journal(tmp_path / "events.jsonl"))
    assert looked == [tmp_path], "once"
    assert held.state == WRITTEN

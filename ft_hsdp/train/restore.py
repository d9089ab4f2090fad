"""Restore: with which state a replica comes to its job: what its agents kept, a checkpoint, or its initial one.

The ranks choose together, so that all of them hold one state.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from ft_hsdp.core.cursor import Ledger
from ft_hsdp.core.lineage import StateId
from ft_hsdp.errors import ConfigError
from ft_hsdp.events import Journal
from ft_hsdp.state.ranks import Ranks
from ft_hsdp.state.resume import resume
from ft_hsdp.state.slots import Held as Kept
from ft_hsdp.state.slots import newest_common
from ft_hsdp.train.held import Held
from ft_hsdp.train.keeper import Keeper


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Where durable checkpoints are, of which configuration they have to be, and how their ledgers are read."""

    folder: Path
    config_hash: str
    replicas: int
    redealt: Callable[[Ledger], Ledger]


def restore(
    held: Held, keeper: Keeper, ranks: Ranks, checkpoints: Checkpoints, current: bool, journal: Journal
) -> None:
    """Bring ``held``, which has its initial state, to the newest that is found. A collective of all ranks.

    ``current``: the agents keep every step, so what they have is never older than a checkpoint.

    Raises:
        ConfigError: there are checkpoints, but none that can be used.
    """
    kept = newest_common([_decode(each) for each in ranks.gather(_encode(keeper.recall()))])
    if kept is None or not current:
        _resume(held, ranks, checkpoints, journal)
    assert held.state is not None
    if kept is None or (kept.commit_epoch, kept.step) <= (held.state.commit_epoch, held.state.step):
        return
    found = keeper.take(kept)
    fits = found is not None and found[0].layout == held.layout.fingerprint
    if min(ranks.gather(b"\1" if fits else b"\0")) == b"\0":
        return
    assert found is not None
    held.load(*found)
    keeper.release_taken()
    if ranks.rank == 0:
        journal.event("StateRestored", "the state agent of this host kept it", step=kept.step, origin="agent")


def _resume(held: Held, ranks: Ranks, checkpoints: Checkpoints, journal: Journal) -> None:
    with held.here():
        found = resume(checkpoints.folder, checkpoints.config_hash, held.params, held.optim, ranks)
    if found is None:
        return
    try:
        ledger = checkpoints.redealt(found.ledger)
    except ValueError as error:
        raise ConfigError(
            "replicas", checkpoints.replicas, f"the number that the checkpoint has ({error})"
        ) from None
    held.resumed(found.state, ledger, found.hyper)
    if ranks.rank == 0:
        for passed in found.skipped:
            journal.event("CheckpointPassedOver", passed.reason, checkpoint=passed.name)
        facts = {"step": found.state.step, "origin": str(found.path), "seconds": found.seconds}
        journal.event("StateRestored", "newest valid checkpoint", **facts)


def _encode(kept: tuple[Kept, ...]) -> bytes:
    return json.dumps([asdict(each.state) for each in kept]).encode()


def _decode(said: bytes) -> list[Kept]:
    return [Kept(StateId(**each), settled=False) for each in json.loads(said)]

"""RunLog: what the leader writes down: batches that were fed, steps that were committed, the final state."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ft_hsdp.core.commit import CommitRecord
from ft_hsdp.core.cursor import Ledger
from ft_hsdp.core.lineage import StateId
from ft_hsdp.events import Lines


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds and bytes of one step as this replica saw it; ``waits`` are the exposed ones, by cause."""

    step_s: float
    waits: dict[str, float]
    ftar_bytes: int
    ftar_s: float


def exposed(now: float, waited: float, reduced: float, held_up: float) -> dict[str, float]:
    """The last ``waited`` seconds before ``now``, by cause: FTAR went on after backward until ``reduced``, then
    the replicas agreed. FTAR ended so late because it was ``held_up`` for the lighthouse's answer: that is not its
    own, as far as it showed."""
    late = min(max(reduced - (now - waited), 0.0), waited)
    quorum = min(held_up, late)
    return {"quorum": quorum, "ftar": late - quorum, "commit": waited - late}


class RunLog:
    """The files of one replica in the run directory; rank 0 writes them. ``tee`` hears of each commit."""

    def __init__(
        self, folder: Path, incarnation: str, tee: Callable[[Mapping[str, object]], None] | None = None
    ) -> None:
        self._folder = folder
        self._incarnation = incarnation
        self._tee = tee
        self._fed = Lines(folder / "fed.jsonl")
        self._commits = Lines(folder / "commits.jsonl")

    def fed(self, step: int, shard: int, index: int) -> None:
        """A batch is about to be fed to the model."""
        self._fed.write(
            {"t": time.time(), "step": step, "shard": shard, "index": index, "incarnation": self._incarnation}
        )

    def committed(
        self,
        record: CommitRecord,
        lr: float,
        tokens: int,
        timing: Timing,
        contributed: bool,
        ledger: Ledger,
    ) -> None:
        """A step was committed and applied here; ``ledger`` is the one after it."""
        state = record.state_id
        row = {
            "t": time.time(),
            "step": record.step,
            "epoch": record.epoch,
            "attempt": record.attempt,
            "lineage": state.lineage,
            "prev": record.prev,
            "ring": list(record.ring),
            "contributors": list(record.contributors),
            "contributions": [asdict(c) for c in record.contributions],
            "digest": record.digest,
            "poisoned": list(record.poisoned),
            "cursors": list(ledger.cursors),
            "holes": [list(hole) for hole in ledger.holes],
            "loss": record.loss,
            "lr": lr,
            "lr_scale": record.lr_scale,
            "norm": record.norm,
            "total": record.total,
            "chunk_bytes": record.chunk_bytes,
            "step_s": timing.step_s,
            "waits": timing.waits,
            "ftar_bytes": timing.ftar_bytes,
            "ftar_s": timing.ftar_s,
            "tokens": tokens,
            "incarnation": self._incarnation,
            "role": "contribute" if contributed else "behind",
        }
        self._commits.write(row)
        if self._tee is not None:
            self._tee(row)

    def final(self, state: StateId, digest: str) -> None:
        """The replica holds the final state."""
        body = {**asdict(state), "digest": digest, "incarnation": self._incarnation}
        temporary = self._folder / f".final.{os.getpid()}"
        temporary.write_text(json.dumps(body))
        temporary.replace(self._folder / "final.json")

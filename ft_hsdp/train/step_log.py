"""StepLog: what the leader writes down: batches that were fed, steps that were committed, the final state."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ft_hsdp.core.commit import CommitRecord
from ft_hsdp.core.ledger import Ledger
from ft_hsdp.core.state_id import StateId
from ft_hsdp.jsonl import LineWriter, Lost, replace_json, reserve


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


class StepLog:
    """The files of one replica in the run directory; rank 0 writes them. ``tee`` hears of each commit.

    A disk that takes no line costs that line, which ``lost`` hears of later, and never a step.
    """

    def __init__(
        self,
        folder: Path,
        incarnation: str,
        tee: Callable[[Mapping[str, object]], None] | None = None,
        lost: Callable[[Lost], None] | None = None,
    ) -> None:
        self._incarnation = incarnation
        self._tee = tee
        self._lost = lost
        self._fed = LineWriter(folder / "fed.jsonl", lost)
        self._commits = LineWriter(folder / "commits.jsonl", lost)
        self._final = folder / "final.json"
        reserve(self._final)

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
        given_up: Sequence[tuple[int, int]] = (),
    ) -> None:
        """A step was committed and applied here; ``ledger`` is the one after it.

        ``given_up``: the batches that the step has spent although nobody has trained them.
        """
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
            "spoiled": [list(batch) for batch in record.spoiled],
            "poison_retries": record.retries,
            "given_up": [list(batch) for batch in given_up],
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

    def final(self, state: StateId, digest: str, built_in: bool, config: str) -> None:
        """The replica holds the final state; ``built_in``: the trainer of this package has trained it.

        ``config``: the hash of the configuration that it was trained by.
        """
        loop = "built-in" if built_in else "own"
        who = {"incarnation": self._incarnation, "loop": loop, "config_hash": config}
        body = {**asdict(state), "digest": digest, **who}
        try:
            replace_json(self._final, body)
        except OSError as error:
            now = time.time()
            if self._lost is not None:
                self._lost(Lost(self._final.name, 1, now, now, error.strerror or str(error)))

    def close(self) -> None:
        """Close the files; what is lost to the end is told."""
        self._fed.close()
        self._commits.close()

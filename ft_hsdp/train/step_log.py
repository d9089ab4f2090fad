"""The files of one replica in the run's directory: units fed, steps committed, values logged, the final state."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ft_hsdp.core.commit import CommitRecord
from ft_hsdp.core.ledger import Ledger, Run
from ft_hsdp.core.state_id import StateId
from ft_hsdp.jsonl import Lost, Queued, replace_json, reserve


@dataclass(frozen=True, slots=True)
class Timing:
    step_s: float  # since the commit before
    waits: dict[str, float]  # seconds in which the main thread waited, by cause
    ftar_bytes: int  # sent
    ftar_s: float  # of its all-reduces, hidden or not
    copied: int = 0  # bytes of copies of the state before that its hosts made


def exposed(
    now: float, waited: float, reduced: float, held_up: float, copying: float = 0.0, packing: float = 0.0
) -> dict[str, float]:
    """Divide the time that the main thread waited for a commit by its causes.

    FTAR goes on after backward until ``reduced``; then votes wait for the snapshot of the state before, then for
    copies of it, and the replicas agree. As far as FTAR ended late because it had waited for the lighthouse's
    answer, the wait is the quorum's.

    Args:
        reduced: When the last all-reduce ended, on the same clock.
        held_up: Seconds for which gradients waited for an order.
        copying: Seconds for which a vote waited for copies of the state before.
        packing: Seconds for which this rank's vote waited for its snapshot of that state.

    Returns:
        Seconds of "quorum", "ftar" and "commit", and of "snapshot" and "copies" if there are any, which add up to
        ``waited``.
    """
    late = min(max(reduced - (now - waited), 0.0), waited)
    quorum = min(held_up, late)
    snapshot = min(packing, waited - late)
    copies = min(copying, waited - late - snapshot)
    found = {"quorum": quorum, "ftar": late - quorum, "commit": waited - late - snapshot - copies}
    more = {"snapshot": snapshot, "copies": copies}
    return found | {cause: seconds for cause, seconds in more.items() if seconds}


@dataclass(eq=False)
class StepLog:
    """Writes fed.jsonl, commits.jsonl, logged.jsonl and final.json; on rank 0.

    A disk that takes no line costs that line, and never a step. A call returns when its line is in the file, or
    after `jsonl.WAIT_S`.
    """

    _folder: Path
    _incarnation: str
    tee: Callable[[Mapping[str, object]], None] | None = None  # takes the row of each commit
    lost: Callable[[Lost], None] | None = None  # takes what a disk did not take, later
    tee_logged: Callable[[Mapping[str, object]], None] | None = None  # takes each row of logged values
    _logged: Queued | None = None  # made by the first row

    def __post_init__(self) -> None:
        self._fed = Queued(self._folder / "fed.jsonl", self.lost)
        self._commits = Queued(self._folder / "commits.jsonl", self.lost)
        self._final = self._folder / "final.json"
        with contextlib.suppress(OSError):
            self._final.unlink()  # of an incarnation before, which was started again
        reserve(self._final)

    def fed(self, step: int, shard: int, index: int, units: int) -> None:
        """Note that a micro-batch is about to be fed to the model: ``units`` units from ``index`` on."""
        where = {"step": step, "shard": shard, "index": index, "units": units}
        self._fed.write({"t": time.time(), **where, "incarnation": self._incarnation})

    def committed(
        self,
        record: CommitRecord,
        lr: float,
        tokens: int,
        timing: Timing,
        contributed: bool,
        ledger: Ledger,
        given_up: Sequence[Run] = (),
    ) -> None:
        """Note that a step is committed, before it is applied here."""
        state = record.state_id
        row = {
            "t": time.time(),
            "step": record.step,
            "epoch": record.epoch,
            "attempt": record.attempt,
            "lineage": state.lineage,
            "prev": record.prev,
            "ring": list(record.ring),
            **({"ring_widths": list(record.ring_widths)} if record.ring_widths else {}),
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
            "units": record.units,
            "units_wanted": record.wanted,
            "chunk_bytes": record.chunk_bytes,
            "step_s": timing.step_s,
            "waits": timing.waits,
            "ftar_bytes": timing.ftar_bytes,
            "ftar_s": timing.ftar_s,
            "tokens": tokens,
            **({"copied_bytes": timing.copied} if timing.copied else {}),
            "incarnation": self._incarnation,
            "role": "contribute" if contributed else "behind",  # also of one that stands by: it adds nothing
        }
        self._commits.write(row)
        if self.tee is not None:
            self.tee(row)

    def logged(self, step: int, epoch: int, values: Mapping[str, float | None], lineage: str = "") -> None:
        """Note values of a step; with ``lineage``, of the state from which alone they follow on any replica."""
        where = {"step": step, "epoch": epoch, **({"lineage": lineage} if lineage else {})}
        row = {"t": time.time(), **where, "values": dict(values), "incarnation": self._incarnation}
        if self._logged is None:
            self._logged = Queued(self._folder / "logged.jsonl", self.lost)
        self._logged.write(row)
        if self.tee_logged is not None:
            self.tee_logged(row)

    def final(self, state: StateId, digest: str, config: str, *, built_in: bool, of_job: bool) -> None:
        """Note the final state.

        Args:
            of_job: Whether it is that of all replicas, and not only the last one of this replica.
        """
        loop = "built-in" if built_in else "own"
        who = {"incarnation": self._incarnation, "loop": loop, "config_hash": config, "of_job": of_job}
        body = {**asdict(state), "digest": digest, **who}
        try:
            replace_json(self._final, body)
        except OSError as error:
            now = time.time()
            if self.lost is not None:
                self.lost(Lost(self._final.name, 1, now, now, error.strerror or str(error)))

    def close(self) -> None:
        self._fed.close()
        self._commits.close()
        if self._logged is not None:
            self._logged.close()

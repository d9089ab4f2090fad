"""`replay`: one process trains the committed steps of a run again, unsharded, and compares every bit.

It takes only the recorded contributors, batches, ring orders and chunk plans from the run. If it reaches the same
lineage at every step and the same digest at the end, then sums, divisors, learning rates and data were as the
records say, through all failures. Results depend on the number of threads and on the CPU's instruction set, so a
replay must run on the same kind of machine as the job.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ft_hsdp import secret
from ft_hsdp.analysis.commits import newest_final
from ft_hsdp.config import Config, load
from ft_hsdp.core import state_id
from ft_hsdp.core.commit import CommitRecord, Contribution
from ft_hsdp.core.ledger import BatchAssigner, Ledger
from ft_hsdp.core.ring import RingPlan, fold_order
from ft_hsdp.errors import ConfigError
from ft_hsdp.ftar.settings import Settings
from ft_hsdp.launch.run.directory import Row, RunDir
from ft_hsdp.launch.run.recorder import commits_of, finals_of
from ft_hsdp.state.checkpoint import catalog, dcp
from ft_hsdp.state.checkpoint.catalog import UNSIGNED
from ft_hsdp.state.checkpoint.checkpoint_manifest import Unauthentic
from ft_hsdp.train import trainer
from ft_hsdp.train.gradients import checksum, sum_of_squares
from ft_hsdp.train.live_state import state_digest
from ft_hsdp.train.optimizer import Groups, create_state, finish, tensors
from ft_hsdp.train.runtime import ring_settings


@dataclass(frozen=True, slots=True)
class ReplayVerdict:
    """What a replay found."""

    run: str  # its name
    steps: int  # number of recorded steps
    equal: bool  # every step, and the final digest
    digest: str  # of the state that the replay reached
    recorded: str  # digest of the final state of the run
    differs_at: int | None = None  # the first step with other batches, or with a sum that has other bits

    def __str__(self) -> str:
        if self.equal:
            return f"{self.run}: {self.steps} steps replayed, bit-identical (digest {self.digest[:16]})"
        where = f"step {self.differs_at} differs" if self.differs_at is not None else "the final digest differs"
        return f"{self.run}: {where}; replayed {self.digest[:16]}, recorded {self.recorded[:16]}"


def replay(run: RunDir) -> ReplayVerdict:
    """Replay a finished run. This takes about the CPU time of the run without its failures.

    Raises:
        ConfigError: The run is not finished, ran on GPUs or with a training loop of the user's, its logs have a
            gap, or its first checkpoint is gone.
    """
    config = load(run.config)
    if config.train.device != "cpu":
        raise ConfigError("RUN", run.name, f"a run on CPUs: a {config.train.device} sums in another order")
    torch.set_num_threads(config.train.threads)
    rows, recorded = _history(run)
    unsharded = _Unsharded(config)
    assigner = BatchAssigner(config.data.assignment, config.slots)
    ledger = (
        assigner.begin() if rows[0]["step"] == 1 else unsharded.resume(run, rows[0]).resharded(assigner.shards)
    )
    differs_at = None
    for row in rows:
        same, lineage = _as_assigned(assigner, ledger, row), unsharded.step(row)
        ledger = _record(row, row["digest"], 0.0).ledger(ledger) if same else ledger
        same_ledger = (list(ledger.cursors), [list(h) for h in ledger.holes]) == (row["cursors"], row["holes"])
        if not same or lineage != row["lineage"] or not same_ledger:
            differs_at = int(row["step"])
            break
    digest = unsharded.digest()
    return ReplayVerdict(
        run.name, len(rows), digest == recorded and differs_at is None, digest, recorded, differs_at
    )


def _as_assigned(assigner: BatchAssigner, ledger: Ledger, row: Row) -> bool:
    """Return whether the contributors of a recorded step trained the batches that were assigned to them."""
    batches = [(c["shard"], c["index"]) for c in row["contributions"]]
    return batches == [assigner.assign(ledger, c["replica"]) for c in row["contributions"]]


def _history(run: RunDir) -> tuple[list[Row], str]:
    """Return the canonical commits of a run from its first step to the end, and the recorded final digest."""
    final = newest_final(finals_of(run).values())
    if final is None:
        raise ConfigError("RUN", run.name, "a run that has ended")
    if final.get("loop") == "own":
        allowed = "a run of the built-in trainer: what a training loop of your own computes cannot be repeated"
        raise ConfigError("RUN", run.name, f"{allowed} (`verify RUN` checks its logs and digests)")
    rows = commits_of(run)
    steps = [r["step"] for r in rows]
    if not steps or steps != list(range(steps[0], final["step"] + 1)):
        raise ConfigError("RUN", run.name, f"a run whose logs hold each of its steps up to {final['step']}")
    return rows, str(final["digest"])


class _Unsharded:
    """The whole model in one process, with the arithmetic of sharded replicas and of the ring between them."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._ranks = config.ranks_per_replica
        self._ring_settings = ring_settings(config)
        self._data = trainer.dataset(config)
        plain = config.train.model_copy(update={"recompute": False})  # recomputation changes no bit
        self._model = trainer.build(config.model_copy(update={"train": plain}))
        optimizer = trainer.build_optimizer(config, list(self._model.parameters()))
        create_state(optimizer)
        self._groups = Groups(optimizer, lambda step: trainer.factor(config, step))
        self._names = {id(p): n for n, p in self._model.named_parameters()}
        self._buckets: list[list[nn.Parameter]] = [list(m.parameters()) for m in reversed(self._model.shards())]

    def resume(self, run: RunDir, first: Row) -> Ledger:
        """Load the checkpoint on which the first recorded step builds, and return its ledger.

        Args:
            run: The run's directory.
            first: The canonical commit of its first step.

        Raises:
            ConfigError: The checkpoint is not there any more.
        """
        folder = Path(self._config.checkpoint.dir or run.path / "checkpoints")
        key = None if self._config.checkpoint.trust else secret.run_key(run.path, self._config.checkpoint.key)
        try:
            found = catalog.newest(folder, key, first["step"] - 1).checkpoint if folder.is_dir() else None
        except Unauthentic as error:
            raise ConfigError("checkpoint.dir", str(folder / str(error)), UNSIGNED) from None
        if found is None or found.manifest.state.lineage != first["prev"]:
            allowed = f"a run from step 1, or one with its checkpoint of step {first['step'] - 1} in {folder}"
            raise ConfigError("RUN", run.name, allowed)
        params = {dcp.key("param", n): p for n, p in self._model.named_parameters()}
        optim = {dcp.key("optim", n): t for n, t in tensors(self._groups.optimizer, self._names).items()}
        dcp.load(found.path, {**params, **optim}, found.manifest)
        self._groups.adopt(found.manifest.hyper)
        return found.manifest.ledger

    def step(self, row: Row) -> str:
        """Train one recorded step and return the lineage of the state after it."""
        config = self._config
        if row["poisoned"]:  # it changed no weight, and the bits of a NaN cannot be compared
            return _record(row, row["digest"], 0.0).state_id.lineage
        gradients = {c["replica"]: self._replica(c["shard"], c["index"]) for c in row["contributions"]}
        ring, chosen = row["ring"], frozenset(gradients)
        reduced = [
            [
                _ring_sum({r: g[rank][b] for r, g in gradients.items()}, ring, chosen, self._ring_settings)
                for b in range(len(self._buckets))
            ]
            for rank in range(self._ranks)
        ]
        digest = state_id.digest([state_id.digest([checksum(t) for t in shards]) for shards in reduced])
        norm = sum(sum_of_squares(s) for s in reduced) ** 0.5 / sum(c["weight"] for c in row["contributions"])
        record = _record(row, digest, norm)
        for shards in reduced:
            finish(record, shards, config.optim.clip, config.train.accumulate)
        for b, params in enumerate(self._buckets):
            self._assign(params, [reduced[rank][b] for rank in range(self._ranks)])
        self._groups.step(record)
        self._model.zero_grad(set_to_none=True)
        return record.state_id.lineage

    def _replica(self, shard: int, index: int) -> list[list[Tensor]]:
        """Return the contribution of one replica: for each of its ranks a flat shard of each bucket."""
        per_rank = [self._rank(shard, index, rank) for rank in range(self._ranks)]
        return [
            [_average([g[b][rank] for g in per_rank], rank) for b in range(len(self._buckets))]
            for rank in range(self._ranks)
        ]

    def _rank(self, shard: int, index: int, rank: int) -> list[list[Tensor]]:
        """Return one rank's gradient of its part of the batch: for each bucket the flat shard of each rank."""
        for micro in range(self._config.train.accumulate):
            self._loss(self._data.batch(shard, index, rank, micro)).backward()
        pieces = [list(zip(*(self._cut(p) for p in params), strict=True)) for params in self._buckets]
        self._model.zero_grad(set_to_none=True)
        return [[torch.cat(parts) for parts in bucket] for bucket in pieces]

    def _loss(self, batch: Any) -> Tensor:
        """Return the loss, with the parameters in the dtype in which FSDP2 would gather them."""
        dtype = trainer.policy(self._config).param_dtype
        if dtype is None:
            return self._model(batch)
        gathered = {name: param.to(dtype) for name, param in self._model.named_parameters()}
        return torch.func.functional_call(self._model, gathered, (batch,))

    def _cut(self, param: nn.Parameter) -> Iterator[Tensor]:
        """Return the flat, padded shards of one parameter's gradient, as FSDP2 cuts it along dimension 0."""
        assert param.grad is not None
        rows = -(-param.shape[0] // self._ranks)
        whole = torch.zeros(rows * self._ranks, *param.shape[1:])
        whole[: param.shape[0]] = param.grad
        return (piece.reshape(-1) for piece in whole.split(rows))

    def _assign(self, params: Sequence[nn.Parameter], shards: Sequence[Tensor]) -> None:
        """Join the ranks' reduced shards of one bucket, and set them as gradients."""
        place = 0
        for param in params:
            rows = -(-param.shape[0] // self._ranks)
            size = rows * (param.numel() // param.shape[0])
            whole = torch.cat([s[place : place + size].view(rows, *param.shape[1:]) for s in shards])
            param.grad = whole[: param.shape[0]].clone()
            place += size

    def digest(self) -> str:
        """Return the digest of the current state."""
        params = dict(self._model.named_parameters())
        return state_digest(params, tensors(self._groups.optimizer, self._names), self._groups.hyper())


def _record(row: Row, digest: str, norm: float) -> CommitRecord:
    """Return the commit record of a recorded step with the digest and the norm of the sums of this process."""
    return CommitRecord(
        epoch=row["epoch"],
        attempt=row["attempt"],
        step=row["step"],
        prev=row["prev"],
        ring=tuple(row["ring"]),
        total=row["total"],
        contributions=tuple(Contribution(**c) for c in row["contributions"]),
        digest=digest,
        norm=norm,
        lr_scale=row["lr_scale"],
        poisoned=tuple(row["poisoned"]),
        spoiled=tuple((shard, index) for shard, index in row.get("spoiled", ())),
        retries=row.get("poison_retries", 0),
    )


def _average(of_ranks: Sequence[Tensor], rank: int) -> Tensor:
    """Return the mean over a replica's ranks, in the order of gloo's reduce-scatter for the shard of `rank`."""
    ranks = len(of_ranks)
    total = of_ranks[(rank - 1) % ranks].clone()
    for k in range(2, ranks + 1):
        total.add_(of_ranks[(rank - k) % ranks])
    return total.div_(ranks)


def _ring_sum(
    of_replicas: dict[int, Tensor], ring: Sequence[int], contributors: frozenset[int], settings: Settings
) -> Tensor:
    """Return the sum over replicas in the order of the ring, shard by shard in each partition."""
    out = torch.empty_like(next(iter(of_replicas.values())))
    plan = RingPlan.cut(out.numel(), out.element_size(), len(ring), settings.slots, settings.chunk_bytes)
    for shard in range(len(ring)):
        first, *others = fold_order(shard, ring, contributors)
        for span in plan.shard_spans(shard):
            piece = out[span.start : span.stop]
            piece.copy_(of_replicas[first][span.start : span.stop])
            for replica in others:
                piece.add_(of_replicas[replica][span.start : span.stop])
    return out

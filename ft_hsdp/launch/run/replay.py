"""`replay`: the committed steps of a run are trained again, and every bit is compared.

A run of the built-in trainer is trained unsharded, in one process, which also checks what FSDP2 did. The entry of
a user runs again in the ranks of one replica (`replay_entry`).

It takes only the recorded contributors, batches, ring orders and chunk plans from the run. If it reaches the same
lineage at every step and the same digest at the end, then sums, divisors, learning rates and data were as the
records say, through all failures. Results depend on the number of threads and on the CPU's instruction set, so a
replay must run on the same kind of machine as the job.

Sums are added in one process as the job's rings have added them, lane by lane (`train.lanes`); replicas of one
width have a lane for each rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ft_hsdp import secret
from ft_hsdp.analysis.commits import counted, newest_final
from ft_hsdp.config import Config, load, resume_hash
from ft_hsdp.core import state_id
from ft_hsdp.core.commit import CommitRecord, Contribution
from ft_hsdp.core.ledger import Ledger
from ft_hsdp.errors import ConfigError
from ft_hsdp.ftar.connections import LaneRing
from ft_hsdp.ftar.settings import Settings
from ft_hsdp.ftar.settings import Settings as RingSettings
from ft_hsdp.launch.run import replay_entry
from ft_hsdp.launch.run.directory import Row, RunDir
from ft_hsdp.launch.run.recorder import check_counts_units, commits_of, finals_of
from ft_hsdp.state.checkpoint import catalog, dcp
from ft_hsdp.state.checkpoint.catalog import UNSIGNED, Checkpoint, differing_data
from ft_hsdp.state.checkpoint.checkpoint_manifest import Unauthentic
from ft_hsdp.train import trainer
from ft_hsdp.train.data.facts import PROBE_S
from ft_hsdp.train.gradients import judged
from ft_hsdp.train.lanes import GradientLanes, LanePart, LanePlan, one_lane
from ft_hsdp.train.optimizer.creation import create_state
from ft_hsdp.train.optimizer.groups import Groups, finish
from ft_hsdp.train.replay.job import record_of
from ft_hsdp.train.replay.lanes import gathered, sum_part
from ft_hsdp.train.state.checkpointing import job_data
from ft_hsdp.train.state.packing import state_digest


@dataclass(frozen=True, slots=True)
class ReplayVerdict:
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


def replay(run: RunDir, begins: Callable[[], object] = lambda: None) -> ReplayVerdict:
    """Replay a finished run. This takes about the CPU time of the run without its failures.

    Args:
        run: The run.
        begins: Called when nothing is known that would refuse the run, before its first step is trained.

    Raises:
        ConfigError: The run is not finished, ran on GPUs or with a training loop of the user's, an earlier version
            made it, its logs have a gap, or its first checkpoint is gone.
    """
    check_counts_units(run)
    config = load(run.config)
    if config.train.device != "cpu":
        raise ConfigError("RUN", run.name, f"a run on CPUs: a {config.train.device} sums in another order")
    rows, recorded = _history(run, config)
    if config.entry is not None:
        if rows[0]["step"] != 1:
            _checkpoint_before(run, config, rows[0])
        begins()
        found = replay_entry.repeat(run, config, rows)
        equal = found.digest == recorded and found.differs_at is None
        return ReplayVerdict(run.name, len(rows), equal, found.digest, recorded, found.differs_at)
    torch.set_num_threads(config.train.threads)
    unsharded = _Unsharded(config)
    shards, units = config.data_shards, config.train.accumulate * config.data_ranks
    first = rows[0]["step"] == 1
    ledger = Ledger.empty(shards) if first else unsharded.resume(run, rows[0]).resharded(shards, units)
    differs_at = None
    begins()
    for row in rows:
        after = _after(ledger, row)
        if after is None or unsharded.step(row) != row["lineage"] or not _stands(after, row):
            differs_at = int(row["step"])
            break
        ledger = after
    digest = unsharded.digest()
    return ReplayVerdict(
        run.name, len(rows), digest == recorded and differs_at is None, digest, recorded, differs_at
    )


def _after(ledger: Ledger, row: Row) -> Ledger | None:
    """The ledger after a recorded step; None if a unit of it was trained before."""
    try:
        return record_of(row).ledger(ledger)
    except ValueError:
        return None


def _stands(ledger: Ledger, row: Row) -> bool:
    """Whether a recorded step left the ledger that it should."""
    return (list(ledger.cursors), [list(h) for h in ledger.holes]) == (row["cursors"], row["holes"])


def _history(run: RunDir, config: Config) -> tuple[list[Row], str]:
    """Return the canonical commits of a run from its first step to the end, and the recorded final digest."""
    final = newest_final(finals_of(run).values())
    if final is None:
        raise ConfigError("RUN", run.name, "a run that has ended")
    if final.get("loop") == "own" and config.entry is None:
        allowed = "a run of the built-in trainer or of an `entry`: another loop cannot be started from here"
        raise ConfigError("RUN", run.name, f"{allowed} (`verify RUN` checks its logs and digests)")
    rows = commits_of(run)
    steps = [r["step"] for r in rows]
    if not steps or steps != list(range(steps[0], final["step"] + 1)) or not all(map(counted, rows)):
        raise ConfigError("RUN", run.name, f"a run whose logs hold each of its steps up to {final['step']}")
    return rows, str(final["digest"])


def _checkpoint_before(run: RunDir, config: Config, first: Row) -> Checkpoint:
    """Return the checkpoint on which the first recorded step of a run builds, verified.

    Raises:
        ConfigError: The checkpoint is not there any more.
    """
    folder = Path(config.checkpoint.dir or run.path / "checkpoints")
    key = None if config.checkpoint.trust else secret.run_key(run.path, config.checkpoint.key)
    try:
        found = catalog.newest(folder, key, first["step"] - 1).checkpoint if folder.is_dir() else None
    except Unauthentic as error:
        raise ConfigError("checkpoint.dir", str(folder / str(error)), UNSIGNED) from None
    if found is None or found.manifest.state.lineage != first["prev"]:
        allowed = f"a run from step 1, or one with its checkpoint of step {first['step'] - 1} in {folder}"
        raise ConfigError("RUN", run.name, allowed)
    return found


class _Unsharded:
    """The whole model in one process, with the arithmetic of sharded replicas and of the ring between them."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._ranks = config.ranks_per_replica
        self._batch = config.train.accumulate, config.data_ranks
        self._ring_settings = RingSettings.of(config)
        self._data = trainer.dataset(config)
        plain = config.train.model_copy(update={"recompute": False})  # recomputation changes no bit
        self._model = trainer.build(config.model_copy(update={"train": plain}))
        optimizer = trainer.build_optimizer(config, list(self._model.parameters()))
        create_state(optimizer)
        self._groups = Groups(optimizer, lambda step: trainer.factor(config, step))
        self._names = {id(p): n for n, p in self._model.named_parameters()}
        self._buckets: list[list[nn.Parameter]] = [list(m.parameters()) for m in reversed(self._model.shards())]
        self._rows = [[(self._names[id(p)], tuple(p.shape)) for p in bucket] for bucket in self._buckets]

    def resume(self, run: RunDir, first: Row) -> Ledger:
        """Load the checkpoint on which the first recorded step builds, and return its ledger.

        Args:
            run: The run's directory.
            first: The canonical commit of its first step.

        Raises:
            ConfigError: The checkpoint is not there any more.
        """
        found = _checkpoint_before(run, self._config, first)
        params = {dcp.key("param", n): p for n, p in self._model.named_parameters()}
        optim = {dcp.key("optim", n): t for n, t in self._groups.tensors(self._names).items()}
        dcp.load(found.path, {**params, **optim}, found.manifest)
        self._groups.note_given(self._config.train.steps)
        self._groups.resume(found.manifest.hyper, first["step"] - 1)
        data = job_data(self._config, self._data.facts(time.monotonic() + PROBE_S))
        if data.other and differing_data(found.path, found.manifest, resume_hash(self._config), data):
            return Ledger.empty(self._config.data_shards)
        return found.manifest.ledger.rescaled((found.manifest.accumulate, found.manifest.ranks), self._batch)

    def step(self, row: Row) -> str:
        """Train one recorded step and return the lineage of the state after it."""
        config = self._config
        record = record_of(row)
        if record.skipped:  # the bits of a NaN cannot be compared
            return record.state_id.lineage
        runs: dict[int, list[Contribution]] = {}
        for c in record.contributions:
            runs.setdefault(c.replica, []).append(c)
        gradients = {
            replica: self._replica(theirs, theirs[0].width or self._ranks) for replica, theirs in runs.items()
        }
        found = step_sums(gradients, record, self._rows, self._ring_settings)
        width = len(found.reduced)
        counted = tuple(replace(c, weight=self._weight(c)) for c in record.contributions)
        record = replace(record, contributions=counted, digest=found.digest)
        if not record.updates:
            return record.state_id.lineage
        record = replace(record, norm=found.square**0.5 / (record.divisor / width))
        for shards in found.reduced:
            finish(record, shards, config.optim.clip, width)
        for b, params in enumerate(self._buckets):
            self._assign(params, [shards[b] for shards in found.reduced])
        self._groups.step(record)
        self._model.zero_grad(set_to_none=True)
        return record.state_id.lineage

    def _replica(self, runs: Sequence[Contribution], width: int) -> list[list[Tensor]]:
        """What one replica of so many ranks brings to the ring: for each of them a flat shard of each bucket."""
        total: list[list[Tensor]] = []
        for part in sorted({c.part for c in runs}):
            units = [u for c in runs if c.part == part for u in range(c.index, c.index + c.units)]
            per_rank = [self._rank(runs[0].shard, units[rank::width], width) for rank in range(width)]
            found = [
                [_average([g[b][rank] for g in per_rank], rank) for b in range(len(self._buckets))]
                for rank in range(width)
            ]
            sums = [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(total, found, strict=False)]
            total = sums or found
        return total

    def _rank(self, shard: int, units: Sequence[int], width: int) -> list[list[Tensor]]:
        """One rank's gradient of its micro-batches: for each bucket the flat shard of each rank.

        Args:
            shard: their data shard.
            units: its own unit of each micro-batch.
            width: ranks of its replica.
        """
        for unit in units:
            batch = self._unit(shard, unit)
            weight = trainer.weight(self._config, batch)
            if weight:
                loss = self._loss(batch)
                loss.backward(torch.full_like(loss, weight))
        pieces = [list(zip(*(self._cut(p, width) for p in params), strict=True)) for params in self._buckets]
        self._model.zero_grad(set_to_none=True)
        return [[torch.cat(parts) for parts in bucket] for bucket in pieces]

    def _unit(self, shard: int, unit: int) -> Any:
        index, within = divmod(unit, self._config.train.accumulate * self._ranks)
        return self._data.batch(shard, index, within % self._ranks, within // self._ranks)

    def _weight(self, run: Contribution) -> int:
        """Return the weight of a run, counted again."""
        units = range(run.index, run.index + run.units)
        return sum(trainer.weight(self._config, self._unit(run.shard, unit)) for unit in units)

    def _loss(self, batch: Any) -> Tensor:
        """Return the loss, with the parameters in the dtype in which FSDP2 would gather them."""
        dtype = trainer.policy(self._config).param_dtype
        if dtype is None:
            return self._model(batch)
        gathered = {name: param.to(dtype) for name, param in self._model.named_parameters()}
        return torch.func.functional_call(self._model, gathered, (batch,))

    def _cut(self, param: nn.Parameter, width: int) -> Iterator[Tensor]:
        """Return the flat, padded shards of one parameter's gradient, as FSDP2 cuts it along dimension 0."""
        rows = -(-param.shape[0] // width)
        whole = torch.zeros(rows * width, *param.shape[1:])
        if param.grad is not None:  # None: no micro-batch of the rank has a weight
            whole[: param.shape[0]] = param.grad
        return (piece.reshape(-1) for piece in whole.split(rows))

    def _assign(self, params: Sequence[nn.Parameter], shards: Sequence[Tensor]) -> None:
        """Join the ranks' reduced shards of one bucket, and set them as gradients."""
        place = 0
        for param in params:
            rows = -(-param.shape[0] // len(shards))
            size = rows * (param.numel() // param.shape[0])
            whole = torch.cat([s[place : place + size].view(rows, *param.shape[1:]) for s in shards])
            param.grad = whole[: param.shape[0]].clone()
            place += size

    def digest(self) -> str:
        params = dict(self._model.named_parameters())
        return state_digest(params, self._groups.tensors(self._names), self._groups.hyper())


def _average(of_ranks: Sequence[Tensor], rank: int) -> Tensor:
    """Return the mean over a replica's ranks, in the order of gloo's reduce-scatter for the shard of `rank`."""
    ranks = len(of_ranks)
    total = of_ranks[(rank - 1) % ranks].clone()
    for k in range(2, ranks + 1):
        total.add_(of_ranks[(rank - k) % ranks])
    return total.div_(ranks)


Rows = Sequence[Sequence[tuple[str, tuple[int, ...]]]]
"""Of each bucket, the parameters in order: (name, whole shape)."""


@dataclass(frozen=True, slots=True)
class StepSums:
    reduced: list[list[Tensor]]  # for each rank of the widest member, the flat shard of each bucket
    digest: str  # of what is voted on all lanes
    square: float  # the sum of squares, added in the order of lanes


def step_sums(
    gradients: Mapping[int, Sequence[Sequence[Tensor]]], record: CommitRecord, rows: Rows, settings: Settings
) -> StepSums:
    """Return the sums of a step.

    Args:
        gradients: Of each contributor, for each of its ranks a flat shard of each bucket, fp32.
        record: The commit.
        rows: What the buckets hold.
        settings: Of the rings.
    """
    widths = set(record.ring_widths) or {len(shards) for shards in gradients.values()}
    widest = max(widths)
    plans = {width: _plans(rows, width, record.ring_widths) for width in widths}
    owned = {
        width: {lane.ring.number: (rank, lane) for rank, plan in enumerate(of_ranks) for lane in plan.lanes}
        for width, of_ranks in plans.items()
    }
    reduced = [[torch.zeros(_size(bucket, widest)) for bucket in rows] for _ in range(widest)]
    summed: dict[int, list[tuple[LanePart, list[Tensor]]]] = {number: [] for number in sorted(owned[widest])}
    for rank, plan in enumerate(plans[widest]):
        for bucket, flat in enumerate(reduced[rank]):
            for _, lane, part in plan.of(bucket):
                theirs = {}
                for replica, shards in gradients.items():
                    at, its = owned[len(shards)][lane.ring.number]
                    theirs[replica] = gathered(its.parts[bucket], shards[at][bucket])
                sums = sum_part(part, theirs, flat, record.ring, settings)
                summed[lane.ring.number].append((part, sums))
    votes = [judged(sums) for sums in summed.values()]
    return StepSums(reduced, state_id.digest([digest for digest, _ in votes]), sum(square for _, square in votes))


def _plans(rows: Rows, width: int, widths: Sequence[int]) -> list[LanePlan]:
    """Return the lanes of each rank of a replica of ``width`` ranks."""
    usual = [one_lane(LaneRing(rank, ""), [_size(bucket, width) for bucket in rows]) for rank in range(width)]
    return [GradientLanes(rows, usual[rank], width, rank).plan(widths) for rank in range(width)]


def _size(bucket: Sequence[tuple[str, tuple[int, ...]]], width: int) -> int:
    """Return the elements of a rank's flat shard, with the rows that fill it up."""
    return sum(-(-shape[0] // width) * prod(shape[1:]) for _, shape in bucket)

"""The gradient that real ranks apply with `data.weight: tokens`, against that of one big batch in fp64.

A job of two replicas with two ranks each trains a small transformer. A step has three micro-batches of each rank,
whose numbers of tokens are very unequal. One micro-batch has none, and its loss is NaN; one whole step has none,
and updates nothing. A hook of the optimizer writes down each finished gradient with the parameters that it belongs
to. Afterwards the same units are put into one batch, whose gradient is computed in fp64 from the same parameters.
"""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional

import ft_hsdp
from benchmarks.processes import scratch
from ft_hsdp.config import Config, parse
from ft_hsdp.core.randomness import stream
from ft_hsdp.errors import EXIT_OK, FtHsdpError, Retryable
from ft_hsdp.launch.job import JobRun, start_run
from ft_hsdp.launch.local import LocalReplicas
from ft_hsdp.launch.run.directory import Row, RunDir
from ft_hsdp.launch.run.recorder import commits_of
from ft_hsdp.launch.run.terminal import Terminal
from ft_hsdp.train.data.batches import IGNORED
from ft_hsdp.train.identity import IncarnationSource
from ft_hsdp.train.model import ModelArgs, Transformer
from ft_hsdp.train.trainer import build_optimizer

GOAL = 1e-6  # relative difference
RANKS, ACCUMULATE = 2, 3
WORDS, ROWS, SEQ_LEN = 61, 2, 48
EMPTY = (1, 0, 1, 1)  # data shard, index, rank and number of a micro-batch without a token
EMPTY_INDEX = 1  # of the batches of each data shard none of whose micro-batches has one
SETTINGS: Mapping[str, Any] = {
    "replicas": 2,
    "ranks_per_replica": RANKS,
    "train": {"steps": 4, "accumulate": ACCUMULATE, "seq_len": SEQ_LEN, "micro_batch": ROWS},
    "data": {"weight": "tokens"},
    "optim": {"clip": None},
}
_ENTRY = "benchmarks.token_mean:main"
_KEPT = "gradients"  # folder of the run
_DEADLINE_S = 120.0

Batch = tuple[Tensor, Tensor]
Vectors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class TokenMean:
    """The largest relative differences over the steps; of gradients: |a - b| / |b|, over all parameters."""

    steps: int
    updates: int  # steps that have changed the parameters
    gradient: float  # of the applied gradient to that of one big batch in fp64
    one_batch: float  # of the gradient of one big batch in fp32, in one process, to that in fp64
    loss: float  # of the loss in the log to that of one big batch
    mean_over_units: float  # of the mean over units, each a mean over its own tokens, to one big batch
    alike: bool  # whether the gradients of all replicas have the same bits

    @property
    def ok(self) -> bool:
        """Whether gradient and loss are those of one big batch, on each replica."""
        return self.alike and max(self.gradient, self.loss) <= GOAL


class Ragged:
    """Padded sequences of unequal lengths; each micro-batch is a pure function of its place."""

    def batch(self, shard: int, index: int, rank: int, micro: int = 0) -> Batch:
        """Return tokens and those that follow them, int64 [ROWS, SEQ_LEN] each; padding is `IGNORED`."""
        place = (shard, index, rank, micro)
        random = torch.Generator().manual_seed(stream(0, "ragged", *place))
        # Few words are frequent, so that there is something to learn: a gradient of noise alone cancels out, and
        # what is left of it has few digits in fp32, in one big batch too.
        tokens = (WORDS * torch.rand(ROWS, SEQ_LEN + 1, generator=random) ** 4).long()
        lengths = (SEQ_LEN * torch.rand(ROWS, 1, generator=random) ** 3).long() + 1  # most are short
        padding = torch.arange(SEQ_LEN) >= (0 if place == EMPTY or index == EMPTY_INDEX else lengths)
        return tokens[:, :-1], tokens[:, 1:].masked_fill(padding, IGNORED)


def measure() -> TokenMean:
    """Run the job and compare its gradients. Blocks, about ten seconds.

    Raises:
        Retryable: The job fails.
    """
    with scratch() as (_, folder):
        config = parse({"job": {"name": "tokens", "runs_dir": str(folder)}, **SETTINGS})
        run = start_run(config)
        with Terminal(config, io.StringIO()) as terminal:
            job = JobRun(config, run, terminal, partial(LocalReplicas, config, run, entry=_ENTRY))
            code, _ = asyncio.run(asyncio.wait_for(job.run(), _DEADLINE_S))
        rows = commits_of(run)
        if code != EXIT_OK or len(rows) != config.train.steps:
            raise Retryable(f"bench: the job ended with {code} after {len(rows)} steps")
        return _compared(run, rows, config.replicas)


def main(config: Config, replica: int | IncarnationSource, run: Path) -> int:
    """Run one rank of the job, with a training loop as a user writes it; return the exit code."""
    try:
        job = ft_hsdp.join(config, replica, run)
        data = Ragged()
        model = job.shard(_model())
        optimizer = build_optimizer(config, list(model.parameters()))

        def keep(*_: Any) -> None:
            """Write down the finished gradient. All ranks of the replica are here."""
            params: dict[str, DTensor] = dict(model.named_parameters())  # type: ignore[arg-type]
            update = 1 + int(next(iter(optimizer.state.values()))["step"])
            whole = {n: p.full_tensor().detach() for n, p in params.items()}
            grads = {n: p.grad.full_tensor() for n, p in params.items() if isinstance(p.grad, DTensor)}
            if job.rank == 0:
                file = _file(RunDir(run), job.replica, update)
                file.parent.mkdir(exist_ok=True)
                kept = {"params": whole, "grads": grads}
                save_file({f"{key}/{n}": t for key, each in kept.items() for n, t in each.items()}, file)

        optimizer.register_step_pre_hook(keep)
        optim = job.optimizer(optimizer)

        def train(batch: Batch) -> None:
            job.weigh(int((batch[1] != IGNORED).sum()))
            model(batch).backward()

        job.warm_up(lambda: train(data.batch(0, 0, job.rank)))
        for batch in job.batches(data):
            train(batch)
            optim.step()
    except FtHsdpError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return EXIT_OK


def _model() -> Transformer:
    return Transformer(ModelArgs(WORDS, 16, 2, 2, 2, 32, SEQ_LEN))


def _file(run: RunDir, replica: int, update: int) -> Path:
    return run.path / _KEPT / f"{replica}-{update}.safetensors"


def _kept(file: Path) -> dict[str, dict[str, Tensor]]:
    """Return the parameters and gradients that a rank wrote down."""
    found: dict[str, dict[str, Tensor]] = {"params": {}, "grads": {}}
    for name, tensor in load_file(file).items():
        key, _, parameter = name.partition("/")
        found[key][parameter] = tensor
    return found


def _compared(run: RunDir, rows: Sequence[Row], replicas: int) -> TokenMean:
    gradient = one_batch = loss = mean_over_units = 0.0
    alike = True
    updating = [row for row in rows if row["loss"] is not None]
    for update, row in enumerate(updating, 1):
        found, *others = (_kept(_file(run, replica, update)) for replica in range(replicas))
        alike &= all(_equal(found[key], other[key]) for other in others for key in found)
        batches = [batch for c in row["contributions"] for batch in _units(c)]
        whole = [torch.cat(parts) for parts in zip(*batches, strict=True)]
        exact, exact_loss = _gradient(found["params"], whole)
        counted = [batch for batch in batches if (batch[1] != IGNORED).any()]
        each = [_gradient(found["params"], batch)[0] for batch in counted]
        mean = {n: torch.stack([grads[n] for grads in each]).mean(0) for n in exact}
        gradient = max(gradient, _difference(found["grads"], exact))
        one_batch = max(one_batch, _difference(_gradient(found["params"], whole, torch.float32)[0], exact))
        mean_over_units = max(mean_over_units, _difference(mean, exact))
        loss = max(loss, abs(row["loss"] - exact_loss) / exact_loss)
    return TokenMean(len(rows), len(updating), gradient, one_batch, loss, mean_over_units, alike)


def _units(contribution: Mapping[str, int]) -> list[Batch]:
    """Return the units of a recorded contribution."""
    data, shard, first = Ragged(), contribution["shard"], contribution["index"]
    found = []
    for unit in range(first, first + contribution["units"]):
        index, within = divmod(unit, ACCUMULATE * RANKS)
        found.append(data.batch(shard, index, within % RANKS, within // RANKS))
    return found


def _gradient(
    params: Vectors, batch: Sequence[Tensor], dtype: torch.dtype = torch.float64
) -> tuple[dict[str, Tensor], float]:
    """Return gradient and loss of the mean over the tokens of a batch, computed in ``dtype``."""
    model = _model().to(dtype)
    model.load_state_dict(dict(params))
    inputs, targets = batch
    loss = functional.cross_entropy(model.logits(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, float(loss.detach())


def _difference(found: Vectors, exact: Vectors) -> float:
    squares = sum(float((found[n].double() - exact[n]).square().sum()) for n in exact)
    return float((squares / sum(float(exact[n].square().sum()) for n in exact)) ** 0.5)


def _equal(one: Vectors, other: Vectors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)

"""One rank: `python -m ft_hsdp.bench.hsdp.worker FD SPEC` trains so many steps as it is told.

    -> {"steps": 2, "at": 12.5}  <- {"t": 13.6}, before the step that comes next

The training loops are ordinary ones, but each is a generator that stops before each step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import ft_hsdp
from ft_hsdp.bench.hsdp.processes import PATIENCE_S, PRODUCT, RankSpec
from ft_hsdp.bench.trainee import RandomTokens, Waiting, add_waits, hugging_face_llama
from ft_hsdp.bench.workers.link import Answer, Obey, run_worker
from ft_hsdp.config import Config, load
from ft_hsdp.train.fsdp.adopted_model import parts_of, shard
from ft_hsdp.train.trainer import build, build_optimizer


def product(spec: RankSpec, config: Config) -> Iterator[None]:
    """Train with the whole of ft_hsdp, by its public API."""
    os.environ |= {"RANK": str(spec.rank), "WORLD_SIZE": str(spec.ranks), "MASTER_PORT": str(spec.port)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    job = ft_hsdp.join(config, spec.replica, Path(spec.run))
    model = _model(spec, config)
    shard(model, parts_of(model), init_device_mesh("cpu", (spec.ranks,)))
    job.adopt(model)
    optim = job.optimizer(build_optimizer(config, list(model.parameters())))
    optim.clip = config.optim.clip
    for batch in job.batches(_data(config)):
        yield
        _loss(model, batch).backward()
        optim.step()


def torch_fsdp(spec: RankSpec, config: Config) -> Iterator[None]:
    """Train with FSDP2.

    alone: over the ranks of a replica, which knows of no other. hsdp: PyTorch's HSDP, on a mesh of replicas and
    ranks; gradients are all-reduced by gloo.
    """
    shape: tuple[int, ...] = (spec.ranks,)
    rank, store, interface = spec.rank, spec.host, "lo"
    if spec.kind == "hsdp":
        shape = (spec.replicas, spec.ranks)
        rank, store, interface = spec.replica * spec.ranks + spec.rank, spec.first, spec.interface
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    meet, world = f"tcp://{store}:{spec.port}", spec.ranks if len(shape) == 1 else spec.replicas * spec.ranks
    dist.init_process_group("gloo", meet, timedelta(seconds=PATIENCE_S), world_size=world, rank=rank)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "rank")[-len(shape) :])
    model = _model(spec, config)
    shard(model, parts_of(model), mesh)
    optimizer = build_optimizer(config, list(model.parameters()))
    data, index = _data(config), 0
    while True:
        yield
        _loss(model, data.batch(spec.replica, index, spec.rank)).backward()
        if config.optim.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip)
        optimizer.step()
        optimizer.zero_grad()
        index += 1


def _model(spec: RankSpec, config: Config) -> nn.Module:
    if spec.waiting is not None:
        elements, wait_s = spec.waiting
        return Waiting(config.model.layers, elements, wait_s)
    model = hugging_face_llama(config) if spec.hugging_face else build(config)
    if spec.wait_s:
        add_waits(parts_of(model), spec.wait_s)
    return model


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss; models of transformers take tokens as labels, and shift them."""
    if not hasattr(model, "lm_head"):
        loss: Tensor = model(batch)
        return loss
    output: Tensor = model(input_ids=batch[0], labels=batch[0]).loss
    return output


def _data(config: Config) -> RandomTokens:
    return RandomTokens(config.data.vocabulary, config.train.micro_batch, config.train.seq_len)


def set_up() -> tuple[Answer, Obey]:
    """Get ready for the first step."""
    spec = RankSpec(**json.loads(sys.argv[2]))
    torch.set_num_threads(1)
    steps = (product if spec.kind == PRODUCT else torch_fsdp)(spec, load(Path(spec.config)))
    next(steps)

    def train(command: Mapping[str, Any]) -> Answer:
        time.sleep(max(0.0, command["at"] - time.monotonic()))
        for _ in range(command["steps"]):
            next(steps)
        return {"t": time.monotonic()}

    return {"address": spec.host}, train


if __name__ == "__main__":
    run_worker(set_up)

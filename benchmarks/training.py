"""What the ranks of a bench train: the models, and the training loops of ft_hsdp, PyTorch's own HSDP, and torchft.

`main` is the entry of the jobs whose ranks are killed. `python -m benchmarks.training FD SPEC` is one rank of
`bench overhead`, and trains so many steps as it is told:

    -> {"steps": 2, "at": 12.5}  <- {"t": 13.6}, before the step that comes next
    -> {"cpu": true}             <- {"cpu": {"MainThread": 812500, "ftar": 20100}}, microseconds of CPU time so far

Its loops are ordinary ones, but each is a generator that stops before each step.

`python -m benchmarks.training torchft SPEC` is one replica of a loop of torchft's Manager. It writes a line
once everything is imported: {"t": 1.5, "incarnation": "0"}, t in Unix seconds; and one for each committed step,
with "step" and "participants".
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import ft_hsdp
from benchmarks.flame import Sampler
from benchmarks.jobs import PATIENCE_S, PRODUCT, RankSpec, Setup, job_config
from benchmarks.processes import LOOPBACK, Answer, Obey, run_worker
from ft_hsdp.config import Config, load
from ft_hsdp.jsonl import LineWriter
from ft_hsdp.lifetime import die_with
from ft_hsdp.train.fsdp.adopted_model import parts_of, shard
from ft_hsdp.train.trainer import build, build_optimizer

FORWARD = 1 / 3  # of the time that a layer waits; backward takes the rest


class Waiting(nn.Module):
    """A model whose forward and backward wait instead of computing, as a CPU does beside a busy accelerator.

    It has ``layers`` layers of ``elements`` fp32 parameters each; forward and backward together wait ``wait_s``
    seconds. Gradients are whole tensors, ready layer by layer, so that they are exchanged during the rest of
    backward.
    """

    def __init__(self, layers: int, elements: int, wait_s: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(elements, wait_s / layers) for _ in range(layers))

    def forward(self, batch: object) -> Tensor:
        """Return a scalar, whatever ``batch`` is."""
        hidden = torch.ones(1, requires_grad=True)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.sum()


class _Layer(nn.Module):
    def __init__(self, elements: int, wait_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((elements,), 0.5))
        self._wait_s = wait_s

    def forward(self, hidden: Tensor) -> Tensor:
        return Delay.apply(hidden, self._wait_s) * self.weight.mean()


class Delay(torch.autograd.Function):
    """Its input, with a wait in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, wait_s: float) -> Tensor:
        """Wait for a third of ``wait_s``."""
        ctx.wait_s = wait_s
        time.sleep(wait_s * FORWARD)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Wait for the rest."""
        time.sleep(ctx.wait_s * (1 - FORWARD))
        return grads[0], None


def waiting(setup: Setup, config: Config) -> nn.Module:
    """Return a model that waits."""
    return Waiting(setup.layers, setup.elements, setup.wait_s)


def transformer(setup: Setup, config: Config) -> nn.Module:
    """Return the built-in model, as the configuration says it."""
    return build(config)


def make_model(setup: Setup, config: Config) -> nn.Module:
    """Return the model of a setup, not sharded. It takes a batch of `RandomTokens`, and returns the loss."""
    module, _, name = setup.model.partition(":")
    made: nn.Module = getattr(import_module(module), name)(setup, config)
    return made


class RandomTokens:
    """Random tokens, the same for the same place."""

    def __init__(self, config: Config) -> None:
        self._words = config.data.vocabulary
        self._shape = config.train.micro_batch, config.train.seq_len + 1

    def batch(self, shard: int, index: int, rank: int, micro: int = 0) -> tuple[Tensor, Tensor]:
        """Return tokens and those that follow them, [rows, seq_len] each."""
        place = torch.Generator().manual_seed((shard * 1_000_003 + index) * 64 + rank)
        tokens = torch.randint(self._words, self._shape, generator=place)
        return tokens[:, :-1], tokens[:, 1:]


def main() -> None:
    """Run one rank of a job until it is told to leave; the argument is its setup."""
    job = ft_hsdp.join()
    data = RandomTokens(job.config)
    model = job.shard(make_model(Setup(**json.loads(sys.argv[1])), job.config))
    optim = job.optimizer(build_optimizer(job.config, list(model.parameters())))
    job.warm_up(lambda: model(data.batch(0, 0, job.rank)).backward())
    for batch in job.batches(data):
        model(batch).backward()
        optim.step()


def product(spec: RankSpec, setup: Setup, config: Config) -> Iterator[None]:
    """Train with the whole of ft_hsdp, by its public API."""
    os.environ |= {"RANK": str(spec.rank), "WORLD_SIZE": str(setup.ranks), "MASTER_PORT": str(spec.port)}
    os.environ |= {"MASTER_ADDR": LOOPBACK, "GLOO_SOCKET_IFNAME": "lo"}
    job = ft_hsdp.join(config, spec.replica, Path(spec.run))
    model = make_model(setup, config)
    shard(model, parts_of(model), init_device_mesh("cpu", (setup.ranks,)))
    job.adopt(model)
    optim = job.optimizer(build_optimizer(config, list(model.parameters())))
    optim.clip = config.optim.clip
    for batch in job.batches(RandomTokens(config)):
        yield
        model(batch).backward()
        optim.step()


def hsdp(spec: RankSpec, setup: Setup, config: Config) -> Iterator[None]:
    """Train with PyTorch's HSDP, on a mesh of replicas and ranks; gradients are all-reduced by gloo."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    shape = (setup.replicas, setup.ranks)
    meet, limit, rank = f"tcp://{LOOPBACK}:{spec.port}", timedelta(seconds=PATIENCE_S), spec.replica * setup.ranks
    dist.init_process_group("gloo", meet, limit, world_size=math.prod(shape), rank=rank + spec.rank)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "rank"))
    model = make_model(setup, config)
    shard(model, parts_of(model), mesh)
    optimizer = build_optimizer(config, list(model.parameters()))
    data, index = RandomTokens(config), 0
    while True:
        yield
        model(data.batch(spec.replica, index, spec.rank)).backward()
        if config.optim.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip)
        optimizer.step()
        optimizer.zero_grad()
        index += 1


@dataclass(frozen=True, slots=True)
class LoopSpec:
    """Which replica of torchft's loop this is."""

    replica: int
    incarnation: str  # how often it was started before
    setup: Mapping[str, Any]  # what it trains
    file: str  # for its lines
    lighthouse: str  # URL
    timeout_s: float  # of the process group and the manager
    parent: int  # the pid with which it dies


def torchft(given: str) -> None:
    """Train as torchft's own example does, with each gradient all-reduced by hand, until killed."""
    from torchft import Manager, Optimizer
    from torchft.process_group import ProcessGroupGloo

    spec = LoopSpec(**json.loads(given))
    die_with(spec.parent)
    lines, life = LineWriter(Path(spec.file)), {"incarnation": spec.incarnation}
    lines.write({"t": time.time(), **life})
    torch.set_num_threads(1)
    setup = Setup(**spec.setup)
    config = job_config(setup, Path(spec.file).parent)
    model, data = make_model(setup, config), RandomTokens(config)
    adam = torch.optim.AdamW(model.parameters())

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "adam": adam.state_dict()}

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["adam"])

    store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    timeout = timedelta(seconds=spec.timeout_s)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        timeout=timeout,
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        replica_id=f"replica_{spec.replica}",
        lighthouse_addr=spec.lighthouse,
        hostname=LOOPBACK,
        store_addr=LOOPBACK,
        store_port=store.port,
        rank=0,
        world_size=1,
    )
    optim = Optimizer(manager, adam)
    model(data.batch(0, 0, 0)).backward()  # warm, as ours are before they check in
    while True:
        optim.zero_grad()  # asks for the quorum
        model(data.batch(spec.replica, manager.current_step(), 0)).backward()
        for work in [manager.allreduce(p.grad) for p in model.parameters() if p.grad is not None]:
            work.wait()
        before = manager.current_step()
        optim.step()  # votes
        if manager.current_step() > before:
            now = {"t": time.time(), "step": manager.current_step(), "participants": manager.num_participants()}
            lines.write({**now, **life})


def cpu_time() -> Counter[str]:
    """Return the CPU time of each thread of this process in microseconds; the digits of a name do not count."""
    names, found = {thread.native_id: thread.name for thread in threading.enumerate()}, Counter[str]()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            name = names.get(int(task.name)) or (task / "comm").read_text(errors="replace").strip()
            found[re.sub(r"[-_]\d+", "", name)] += int((task / "schedstat").read_text().split()[0]) // 1000
    return found


def set_up() -> tuple[Answer, Obey]:
    """Get ready for the first step."""
    spec = RankSpec(**json.loads(sys.argv[2]))
    torch.set_num_threads(1)
    train = product if spec.kind == PRODUCT else hsdp
    steps = train(spec, Setup(**spec.setup), load(Path(spec.config)))
    next(steps)
    sampler = Sampler()

    def obey(command: Mapping[str, Any]) -> Answer:
        if "cpu" in command:
            return {"cpu": cpu_time()}
        if command.get("stacks") == "start":
            sampler.start()
            return {}
        if command.get("stacks") == "stop":
            return {"stacks": sampler.stop()}
        time.sleep(max(0.0, command["at"] - time.monotonic()))
        for _ in range(command["steps"]):
            next(steps)
        return {"t": time.monotonic()}

    return {}, obey


if __name__ == "__main__":
    if sys.argv[1] == "torchft":
        torchft(sys.argv[2])
    run_worker(set_up)

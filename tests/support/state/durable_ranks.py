"""Ranks of a replica for the tests of checkpoints: a live state, and what is done with it."""

import os
import resource
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.filesystem as torch_files
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ft_hsdp import fault_injection
from ft_hsdp.core.ledger import Ledger
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import ConfigError
from ft_hsdp.mounts import Ability
from ft_hsdp.state.checkpoint import catalog
from ft_hsdp.state.checkpoint.catalog import resume
from ft_hsdp.state.checkpoint.writer import Checkpointer, CheckpointOrigin, Header, Outcome, Published
from ft_hsdp.state.replica_group import ReplicaGroup
from ft_hsdp.state.transfer.shard_manifest import Layout
from ft_hsdp.train.fsdp import frozen
from ft_hsdp.train.fsdp.adopted_model import AdoptedModel, shard
from ft_hsdp.train.optimizer.creation import create_state
from ft_hsdp.train.optimizer.groups import tensors
from ft_hsdp.train.state import packing
from ft_hsdp.train.state.packing import state_digest
from tests.support.forked import of_ranks
from tests.support.os_faults import poor

KEY = b"operator's key"
VALUES: dict[str, dict[str, Any]] = {"ema": {"steps": 3, "best": [0.5, None]}}
HYPER = ({"lr": 0.1, "betas": [0.9, 0.999], "eps": 1e-08, "foreach": None},)
WAIT_S = 60.0


class Uneven(nn.Module):
    """Parameters of 7, 1, 5 and 2 rows: with three ranks most have uneven shards and some have empty ones.

    One more is frozen, with values of a seed of its own.
    """

    def __init__(self, seed: int, width: int, frozen: int = 0) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.wide = nn.Parameter(torch.randn(7, width, generator=g))
        self.one = nn.Parameter(torch.randn(1, generator=g))
        self.deep = nn.Parameter(torch.randn(5, 3, 2, generator=g))
        self.two = nn.Parameter(torch.randn(2, 4, generator=g))
        g.manual_seed(frozen)
        self.still = nn.Parameter(torch.randn(5, 2, generator=g), requires_grad=False)


def two_layers() -> nn.Module:
    """Two layers for tensor parallelism, of sizes that four ranks do not share evenly, and a norm."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 7), nn.LayerNorm(7))


class Side:
    """A rank's live state: an FSDP2 model and AdamW, filled from a seed."""

    def __init__(self, ranks: int, seed: int = 0, width: int = 8, still: int = 0) -> None:
        model = Uneven(seed, width, still)
        shard(model, [], init_device_mesh("cpu", (ranks,)))
        sharded = AdoptedModel(model, ranks, lambda _, __: None)
        optimizer = torch.optim.AdamW(sharded.params.values(), lr=0.1)
        create_state(optimizer)
        self.params = sharded.params
        self.optim = tensors(optimizer, {id(p): n for n, p in sharded.params.items()})
        for at, tensor in enumerate(self.optim.values()):  # alike on any number of ranks
            whole = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed * 1000 + at))
            mine = packing.local(tensor)
            first = _first_row(tensor) if isinstance(tensor, DTensor) else 0
            mine.copy_(whole[first : first + mine.shape[0]] if isinstance(tensor, DTensor) else whole)
        # State of the user: averages of the weights, and a plain tensor that is alike on all ranks.
        self.user = {f"ema/{n}": p.detach() * 2 for n, p in self.params.items()}
        self.user["ema/decay"] = torch.tensor([seed * 1.5, 0.5])
        self.layout = Layout.of(self.params, self.optim, self.user)
        self.ranks = ReplicaGroup(timeout_s=60.0)
        self.made: list[Checkpointer] = []
        self.frozen = frozen.described(frozen.tensors(model), self.ranks)

    def packed(self) -> torch.Tensor:
        buffer = torch.empty(self.layout.nbytes, dtype=torch.uint8)
        live = [*self.params.values(), *self.optim.values(), *self.user.values()]
        packing.pack(self.layout, live, buffer)
        return buffer

    def digest(self) -> str:
        return state_digest(self.params, self.optim, HYPER, self.user)

    def checkpointer(self, folder: str, keep: int = 2) -> Checkpointer:
        about = CheckpointOrigin("0-a-0", 3, "hash", {"model": {"dim": 8}}, frozen=self.frozen)
        live = self.params, self.optim
        made = Checkpointer(Path(folder), keep, KEY, about, self.layout, *live, self.ranks, self.user)
        self.made.append(made)
        return made


def _first_row(tensor: DTensor) -> int:
    """Where this rank's rows begin: torch.chunk's rule."""
    size = -(-tensor.shape[0] // tensor.device_mesh.size())
    return min(size * tensor.device_mesh.get_local_rank(), tensor.shape[0])


def header(step: int, epoch: int = 1) -> Header:
    return Header(StateId(epoch, step, f"{step:032x}"), Ledger((step, 2 * step, 5)), HYPER, VALUES)


def told(outcome: Outcome) -> dict[str, Any]:
    kind = type(outcome).__name__
    reason = getattr(outcome, "reason", "")
    removed = list(outcome.removed) if isinstance(outcome, Published) else []
    return {"kind": kind, "step": outcome.state.step, "reason": reason, "removed": removed}


def written(side: Side, checkpointer: Checkpointer, *headers: Header) -> list[dict[str, Any]]:
    """Write states one after the other; what became of each."""
    return [told(checkpointer.write(side.packed(), each).result(WAIT_S)) for each in headers]


def save(side: Side, folder: str, steps: list[int]) -> Any:
    """Publish each step, one after the other."""
    outcomes = written(side, side.checkpointer(folder), *map(header, steps))
    return {"outcomes": outcomes, "digest": side.digest()}


def load(side: Side, folder: str, config_hash: str = "hash", key: str | None = KEY.decode()) -> Any:
    """Resume, and say what is held then; key None: trust everybody."""
    wanted = None if key is None else key.encode()
    before = side.digest()
    try:
        resumed = resume(
            Path(folder), config_hash, side.params, side.optim, side.ranks, wanted, side.user, side.frozen
        )
    except ConfigError as error:
        return {"refused": str(error)}
    if resumed is None:
        return {"none": side.digest() == before}
    s = resumed
    skipped = [[each.name, each.reason] for each in s.skipped]
    return {
        "digest": side.digest(),
        "state": [s.state.commit_epoch, s.state.step, s.state.lineage],
        "ledger": list(s.ledger.cursors),
        "hyper": s.hyper == HYPER,
        "values": s.user == VALUES,
        "skipped": skipped,
    }


def save_on_two_dimensions(side: Side, folder: str) -> Any:
    """Publish a model of tensor parallel layers, of which one is whole on each rank, sharded by FSDP2 as well."""
    model = two_layers()
    mesh = init_device_mesh("cpu", (side.ranks.size // 2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    params = dict(model.named_parameters())
    layout = Layout.of(params, {})
    packed = torch.empty(layout.nbytes, dtype=torch.uint8)
    packing.pack(layout, list(params.values()), packed)
    about = CheckpointOrigin("0-a-0", 1, "hash", {}, data_ranks=side.ranks.size // 2)
    checkpointer = Checkpointer(Path(folder), 1, KEY, about, layout, params, {}, side.ranks)
    side.made.append(checkpointer)
    return told(checkpointer.write(packed, header(1)).result(WAIT_S))


def save_beside_training(side: Side, folder: str, count: int) -> Any:
    """Publish while the default group is busy; its sums must not change."""
    checkpointer = side.checkpointer(folder)
    wrong = beside = 0
    outcomes = []
    for step in range(1, count + 1):
        future = checkpointer.write(side.packed(), header(step))
        while True:
            done = torch.tensor([float(future.done())])  # ranks leave this loop together
            dist.all_reduce(done)
            values = torch.full((1000,), float(step + dist.get_rank()))
            dist.all_reduce(values)
            wrong += int(values[0].item() != 2 * step + 1)
            if done.item() == dist.get_world_size():
                break
            beside += 1
        outcomes.append(told(future.result(0)))
    return {"outcomes": outcomes, "wrong": wrong, "beside": beside}


def overtaken(side: Side, folder: str) -> Any:
    """Rank 0 asks for four before rank 1 asks for the first: all ranks publish the same ones."""
    checkpointer = side.checkpointer(folder, keep=9)
    futures = []
    if side.ranks.rank == 1:
        dist.barrier()  # all four of rank 0 are there
    for step in (1, 2, 3, 4):
        futures.append(checkpointer.write(side.packed(), header(step)))
        if side.ranks.rank == 1 and step < 4:
            time.sleep(0.05 * step)  # whatever happens meanwhile is right
    if side.ranks.rank == 0:
        dist.barrier()
    return {"outcomes": [told(f.result(WAIT_S)) for f in futures]}


def with_disk_full(side: Side, folder: str, limit: int, on: int, at: str = "") -> Any:
    """Files of rank ``on`` cannot grow beyond ``limit`` bytes at step 2, from ``at`` on; 1 and 3 are as ever."""
    checkpointer = side.checkpointer(folder)
    outcomes = []
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def reach(point: str, step: int) -> None:
        if (point, step, side.ranks.rank) == (at, 2, on):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    fault_injection.reach = reach
    for step in (1, 2, 3):
        reach("", step)
        outcomes += written(side, checkpointer, header(step))
        if step == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    checkpointer.close()
    return {"outcomes": outcomes, "left": sorted(os.listdir(folder))}


def with_different_states(side: Side, folder: str) -> Any:
    """Ranks that are given different lineages publish nothing, and go on."""
    odd = Header(StateId(1, 1, f"{side.ranks.rank:032x}"), Ledger((1, 2, 5)), HYPER)
    return {"outcomes": written(side, side.checkpointer(folder), odd, header(2))}


def with_no_memory_on_one(side: Side, folder: str) -> Any:
    """A rank has no memory for its copy of one state: nobody publishes that, and all go on."""
    checkpointer = side.checkpointer(folder)
    copies = [None if side.ranks.rank == 1 else side.packed(), side.packed()]
    outcomes = [told(checkpointer.write(copy, header(n)).result(WAIT_S)) for n, copy in enumerate(copies, 1)]
    return {"outcomes": outcomes}


def with_a_rank_gone(side: Side, folder: str) -> Any:
    """Rank 1 dies in the middle of its file; rank 0 is told, and hangs nowhere."""
    checkpointer = side.checkpointer(folder)
    first = written(side, checkpointer, header(1))
    if side.ranks.rank == 1:
        _die_in_a_file()
    return {"outcomes": first + written(side, checkpointer, header(2), header(3))}


def die_in_a_file(side: Side, folder: str) -> Any:
    """Every rank is SIGKILLed in the middle of its file of step 2."""
    checkpointer = side.checkpointer(folder)
    written(side, checkpointer, header(1))
    _die_in_a_file()
    written(side, checkpointer, header(2))


def _die_in_a_file() -> None:
    real, count = torch_files._write_item, [0]

    def kill(*args: Any) -> Any:
        count[0] += 1
        if count[0] == 3:
            args[1].flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args)

    torch_files._write_item = kill


def die_at_call(side: Side, folder: str, at: int) -> Any:
    """SIGKILL before the ``at``-th change of the disk's names or fsync, while step 2 is written."""
    checkpointer = side.checkpointer(folder, keep=1)
    checkpointer.write(side.packed(), header(1)).result(WAIT_S)
    count = [0]

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            count[0] += 1
            if count[0] == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **more)

        return call

    for name in ("fsync", "rename", "mkdir", "unlink", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))
    return {"outcomes": written(side, checkpointer, header(2)), "calls": count[0]}


def close_at_once(side: Side, folder: str) -> Any:
    """What was asked for before the end is published; nothing is that is no newer, or asked for afterwards."""
    checkpointer = side.checkpointer(folder)
    future = checkpointer.write(side.packed(), header(1))
    again = checkpointer.write(side.packed(), header(1))
    checkpointer.close()
    late = checkpointer.write(side.packed(), header(2))
    return {"outcomes": [told(each.result(0)) for each in (future, again, late)]}


def save_on(side: Side, folder: str, lacking: list[str]) -> Any:
    """Publish two steps on a file system that lacks something."""
    with poor(Path(folder), *map(Ability, lacking)):
        try:
            return save(side, folder, [1, 2])
        except ConfigError as error:
            return {"refused": str(error)}


def load_what_vanishes(side: Side, folder: str) -> Any:
    """The newest is verified, and its data is gone before it is read."""
    real = catalog.newest

    def newest(*args: Any, **more: Any) -> Any:
        found = real(*args, **more)
        if found.checkpoint is not None and found.checkpoint.manifest.state.step == 2:
            for path in found.checkpoint.path.glob("*.distcp"):
                path.unlink()
        return found

    catalog.newest = newest
    return load(side, folder)


def replica(ranks: int, do: str, folder: Path, made: dict[str, int] | None = None, **arguments: Any) -> list[Any]:
    """What each rank gives that does something, in rank order; ``made`` is for its `Side`."""
    return of_ranks(ranks, _work, do, str(folder), made or {}, arguments, timeout_s=90.0)


def _work(do: str, folder: str, made: dict[str, int], arguments: dict[str, Any]) -> Any:
    warnings.simplefilter("error")
    side = Side(dist.get_world_size(), **made)
    found = globals()[do](side, folder, **arguments)
    for each in side.made:
        each.close()
    return found

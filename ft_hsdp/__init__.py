"""Fault-tolerant hybrid-sharded data-parallel training: one model on N replicas that come and go (FT-HSDP).

Each replica shards the model over its ranks with FSDP2; the replicas all-reduce their gradients over FTAR, a ring
that survives the loss of a member. A replica that fails leaves the ring, the others repeat the step without it,
and it comes back with the state of a living one. A user's loop stays its own:

    job = ft_hsdp.join()
    model = job.shard(model)
    optim = job.optimizer(torch.optim.AdamW(model.parameters()))
    for batch in job.batches(dataset):
        model(batch).backward()
        optim.step()

Read the packages in this order; each has an essay of its own:

    core      every decision of a replica, as pure functions
    protocol  what travels between processes
    control   the leader of a replica, its ranks, and the lighthouse's client
    ftar      the fault-tolerant all-reduce
    state     snapshots in host memory, their transfer, and checkpoints
    train     what runs inside a rank: `Job`
    launch    the processes of a job, and the command line
    analysis  what a run's events say about failures and commits
    memory    copies of the state in host memory, as pure functions
    config    the configuration; errors: errors with their exit codes
    compat    torchft's interfaces on top of ours
    integrations  the trainers of others

The modules beside them serve several packages: `event_table` (what each event says and means) and `jsonl` (the
files of events); `handshake`, `http_proof`, `record_layer`, `tls`, `secret`, `caller_gate` and `bounded` (who may
call, and what a stranger can cost); `address`, `claim`, `control_groups`, `lifetime`, `mounts`; `fault_injection`.

To add an event, begin in `event_table`; a key, in `config`; a message, in `protocol`; a rule of a replica, in
`core`, of the membership, in `lighthouse.quorum`; a source of copies, in `train.state.recovery`; a scheduler whose
jobs are files, in `launch.render`, a cluster with an API, beside `launch.ray`.

The lighthouse, which decides who takes part in a step, is the package `lighthouse` beside this one.

Importing this package imports no torch and no other module of it: a name is loaded on first use. Tools, the state
agent and the lighthouse start fast because of that.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ft_hsdp.config import Config as Config
    from ft_hsdp.config import load as load_config
    from ft_hsdp.errors import ConfigError as ConfigError
    from ft_hsdp.errors import FtHsdpError as FtHsdpError
    from ft_hsdp.train.job import Job as Job
    from ft_hsdp.train.join import join as join
    from ft_hsdp.train.loop.callbacks import CommittedStep as CommittedStep
    from ft_hsdp.train.state.block_store import BlockStore as BlockStore
    from ft_hsdp.train.state.block_store import SubmittedBlocks as SubmittedBlocks

__version__ = "0.1.0"

_PUBLIC = {
    "BlockStore": ("ft_hsdp.train.state.block_store", "BlockStore"),
    "CommittedStep": ("ft_hsdp.train.loop.callbacks", "CommittedStep"),
    "Config": ("ft_hsdp.config", "Config"),
    "ConfigError": ("ft_hsdp.errors", "ConfigError"),
    "FtHsdpError": ("ft_hsdp.errors", "FtHsdpError"),
    "Job": ("ft_hsdp.train.job", "Job"),
    "join": ("ft_hsdp.train.join", "join"),
    "SubmittedBlocks": ("ft_hsdp.train.state.block_store", "SubmittedBlocks"),
    "load_config": ("ft_hsdp.config", "load"),
}

__all__ = [
    "BlockStore",
    "CommittedStep",
    "Config",
    "ConfigError",
    "FtHsdpError",
    "Job",
    "SubmittedBlocks",
    "__version__",
    "join",
    "load_config",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _PUBLIC[name]
    value = getattr(import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})

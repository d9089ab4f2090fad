"""Preflight: what would stop a job, before it is started, and what to do about it."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from ft_hsdp.config import Config, config_hash
from ft_hsdp.errors import FtHsdpError
from ft_hsdp.launch.by_hand import run_of
from ft_hsdp.launch.lighthouse_process import check_port
from ft_hsdp.launch.local import check_device, prepare_data
from ft_hsdp.launch.rundir import alive, read_json

RANK_BYTES = 150 * 2**20  # a forked rank's own memory before it holds a model, measured
COPIES = 14  # fp32 copies: weights, gradients, reduced gradients, two moments; two snapshots, and some to spare
STORED_COPIES = 3  # in a checkpoint: weights and two moments
LOG_BYTES = 200 * 2**20  # logs of a long run
FDS_PER_REPLICA = 64


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: `ok`, and a line that says what was found or what to do."""

    name: str
    ok: bool
    text: str


def examine(config: Config) -> list[Finding]:
    """All checks, in the order in which `up` would meet what they look for."""
    checks: list[tuple[str, Callable[[Config], str]]] = [
        ("config", lambda c: f"hash {config_hash(c)} over model, data, optimizer and layout"),
        ("name", _name),
        ("port", _port),
        ("data", _data),
        ("memory", _memory),
        ("disk", _disk),
        ("files", _files),
        ("cpus", _cpus),
        *([("device", check_device)] if config.train.device != "cpu" else []),
    ]
    findings = []
    for name, check in checks:
        try:
            findings.append(Finding(name, True, check(config)))
        except FtHsdpError as error:
            findings.append(Finding(name, False, str(error)))
        except _Short as short:
            findings.append(Finding(name, False, str(short)))
    return findings


class _Short(Exception):
    """There is too little of something; `str()` says of what, and what to do."""


def parameters(config: Config) -> int:
    """Number of parameters of the model, embedding and head included."""
    from ft_hsdp.train.tokens import VOCABULARY  # numpy is not needed for --help

    model = config.model
    kv = model.dim // model.heads * model.key_value_heads
    block = 2 * model.dim**2 + 2 * model.dim * kv + 3 * model.dim * model.hidden_dim + 2 * model.dim
    return model.layers * block + 2 * VOCABULARY[config.data.tokenizer] * model.dim + model.dim


def _name(config: Config) -> str:
    run = run_of(config)
    for file in (run.supervisor, run.lighthouse):
        named = read_json(file)
        if alive(named):
            raise _Short(f"job.name {run.name} is taken by pid {named['pid']}; end it or choose another name")
    return f"{run.path} is {'moved away first' if run.path.exists() else 'new'}"


def _port(config: Config) -> str:
    check_port(config)
    network = config.network
    return f"{network.host}, any free port" if network.port == 0 else f"{network.host}:{network.port} is free"


def _data(config: Config) -> str:
    tokens = prepare_data(config)
    count = tokens.stat().st_size // 2
    train = config.train
    step = config.replicas * config.ranks_per_replica * train.micro_batch * train.accumulate * train.seq_len
    if count <= step:
        raise _Short(f"{count} tokens, one step reads {step}; give more text in data.path, or smaller batches")
    return f"{count:,} tokens, {step:,} a step: {train.steps * step / count:.2f} passes"


def _memory(config: Config) -> str:
    ranks = config.replicas * config.ranks_per_replica
    need = ranks * RANK_BYTES + config.replicas * COPIES * 4 * parameters(config)
    free = psutil.virtual_memory().available
    text = f"about {_gib(need)} for {parameters(config) / 1e6:.1f} M parameters x {config.replicas}"
    if need > free:
        raise _Short(f"{text}, {_gib(free)} are free; use fewer replicas or a smaller model")
    return f"{text}, {_gib(free)} are free"


def _disk(config: Config) -> str:
    checked = [_room(Path(config.job.runs_dir), "job.runs_dir", LOG_BYTES + 2 * config.data.max_bytes)]
    if config.checkpoint.every and config.checkpoint.dir is not None:
        need = (config.checkpoint.keep + 1) * STORED_COPIES * 4 * parameters(config)
        checked.append(_room(Path(config.checkpoint.dir), "checkpoint.dir", need))
    return "; ".join(checked)


def _room(folder: Path, key: str, need: int) -> str:
    folder = folder.resolve()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(there, os.W_OK):
        raise _Short(f"{there} cannot be written; choose another {key}")
    free = shutil.disk_usage(there).free
    if free < need:
        raise _Short(f"{_gib(free)} are free in {there}, about {_gib(need)} are needed; make room")
    return f"{_gib(free)} are free in {there}"


def _files(config: Config) -> str:
    need = 128 + FDS_PER_REPLICA * config.replicas
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < need:
        raise _Short(f"{soft} open files are allowed per process, {need} are needed; run `ulimit -n {need}`")
    return f"{soft} open files are allowed per process"


def _cpus(config: Config) -> str:
    ranks = config.replicas * config.ranks_per_replica
    have = len(os.sched_getaffinity(0))
    shared = f"; {ranks} ranks share them, which is slow but right" if ranks > have else ""
    return f"{have} processors{shared}"


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"

"""Checks of versions and storage: torch, the run's folder, the training data, room on disks, checkpoints."""

from __future__ import annotations

import os
import platform
import re
import shutil
from importlib import metadata
from pathlib import Path

from ft_hsdp.errors import ConfigError
from ft_hsdp.launch.backend.processes import take_name
from ft_hsdp.launch.doctor.host import gib, weights
from ft_hsdp.launch.doctor.network import tokens
from ft_hsdp.launch.doctor.result import Bad, Subject, Undecided
from ft_hsdp.launch.run.directory import alive, read_json, run_of
from ft_hsdp.launch.standalone import another_agent, name_of_agent
from ft_hsdp.mounts import Ability, existing, mount_of, need, need_store
from ft_hsdp.train.identity import host_name


def installed(_: Subject) -> str:
    """Check that torch is new enough for this package."""
    try:
        have = metadata.version("torch")
    except metadata.PackageNotFoundError:
        raise Bad("torch is not installed; `make venv` does it, or pip install torch") from None
    least = lower_bound("torch", asked_for())
    text = f"torch {have}, Python {platform.python_version()}"
    if numbers(have) < numbers(least):
        raise Bad(f"{text}; torch must be {least} or newer: pip install 'torch>={least}'")
    return f"{text}; torch {least} or newer is required"


def asked_for() -> list[str]:
    """Return this package's requirements, one line each.

    Raises:
        Undecided: The package is not installed.
    """
    try:
        return metadata.requires("ft_hsdp") or []
    except metadata.PackageNotFoundError:
        raise Undecided("ft_hsdp is not installed, so its requirements are not known") from None


def lower_bound(package: str, requirements: list[str]) -> str:
    """Return the X of `package>=X`.

    Raises:
        Undecided: The requirements have no such line.
    """
    for line in requirements:
        found = re.fullmatch(rf"{re.escape(package)}\s*>=\s*([0-9][0-9.]*)", line.partition(";")[0].strip())
        if found:
            return found[1]
    raise Undecided(f"the requirements name no oldest version of {package}")


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, which can be compared: (2, 13, 0) of 2.13.0+cpu."""
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[+a-z]", version)[0]))


STORED_COPIES = 3  # fp32 copies of the model in a checkpoint: weights and two moments
LOG_BYTES = 200 * 2**20  # logs of a long run
ENOUGH = 64 * 2**20  # tokens; the count stops there


def name(subject: Subject) -> str:
    """Check that no running job has the name, and no other agent that of this host if the lighthouse is there."""
    run = run_of(subject.config)
    if subject.lighthouses and (known := tokens(subject)):
        host = host_name(os.environ)
        if (free := take_name(name_of_agent(known[0], host))) is None:
            raise another_agent(host)
        free.close()
    for file in (run.supervisor,) if subject.lighthouses else (run.supervisor, run.lighthouse):
        named = read_json(file)
        if alive(named):
            raise Bad(f"job.name {run.name} is taken by pid {named['pid']}; end it or choose another name")
    return f"{run.path} {'exists and will be renamed' if run.path.exists() else 'is new'}"


def data(subject: Subject) -> str:
    """Check that there is training data, and more than one step reads. Reads it, but writes no cache."""
    from ft_hsdp.train import tokens  # numpy is not needed for --help

    config, train = subject.config, subject.config.train
    step = config.replicas * config.data_ranks * train.micro_batch * train.accumulate * train.seq_len
    enough = max(ENOUGH, step + 1)
    count = tokens.count(config.data.path, config.data.tokenizer, config.data.max_bytes, enough)
    if count <= step:
        raise Bad(f"{count} tokens, one step reads {step}; give more text in data.path, or smaller batches")
    if count >= enough:
        return f"more than {enough:,} tokens, {step:,} per step"
    return f"{count:,} tokens, {step:,} per step: {train.steps * step / count:.2f} epochs"


def disk(subject: Subject) -> str:
    """Check that there is room on disk for the run and its checkpoints, and what the run's file system can do."""
    config = subject.config
    built_in = config.entry is None  # else the sizes of data and model are not known
    tokens = 2 * config.data.max_bytes if built_in else 0
    checked = [_room(Path(config.job.runs_dir), "job.runs_dir", LOG_BYTES + tokens)]
    store = not (config.lighthouse.etcd or subject.lighthouses)
    _missing(Path(config.job.runs_dir), "job.runs_dir", Ability.LOCKS, Ability.RENAME, store=store)
    if config.checkpoint.dir is not None:
        most = (config.checkpoint.keep + 1) * STORED_COPIES * weights(config) if built_in else 0
        checked.append(_room(Path(config.checkpoint.dir), "checkpoint.dir", most))
    return "; ".join(checked)


def checkpoint(subject: Subject) -> str:
    """Check what the file system of checkpoints can do; report whether all machines can share it."""
    config = subject.config
    if config.checkpoint.dir is None:
        if not config.checkpoint.every:
            return "checkpoint.every is 0, and there is no checkpoint.dir: none are written"
        return "in the run's folder, where a new run does not find them; set checkpoint.dir to resume"
    missing = _missing(Path(config.checkpoint.dir), "checkpoint.dir", Ability.RENAME)
    mount = mount_of(Path(config.checkpoint.dir))
    if mount is None:
        return f"{config.checkpoint.dir} is on an unknown file system{missing}"
    where = "a network file system" if mount.network else "a local disk"
    spans = ", but replicas on other machines need a shared one" if subject.spans and not mount.network else ""
    return f"{config.checkpoint.dir} is on {where}{spans} ({mount.kind} at {mount.place}){missing}"


def _missing(folder: Path, key: str, *needed: Ability, store: bool = False) -> str:
    """Return what is not needed and not there, as the end of a sentence; a lighthouse may have its store there."""
    try:
        if store:
            need_store(folder)
        missing = need(folder, key, *needed)
    except ConfigError as error:
        raise Bad(str(error)) from None
    except OSError as error:
        raise Bad(f"{existing(folder)} cannot be written ({error.strerror}); choose another {key}") from None
    return f"; it goes without {' and '.join(missing)}" if missing else ""


def _room(folder: Path, key: str, need: int) -> str:
    there = existing(folder)
    if not os.access(there, os.W_OK):
        raise Bad(f"{there} cannot be written; choose another {key}")
    free = shutil.disk_usage(there).free
    if free < need:
        raise Bad(f"{there} has {gib(free)} free, about {gib(need)} are needed; make room")
    return f"{there} has {gib(free)} free"

"""Who takes part: every contender by the name that users give it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to sum.

    entry: "module:class" of its Rank, or "mpirun" where OpenMPI starts the ranks; options: for its Seat; copies:
    how many tensors of the measured size a rank holds; needs: packages without which it is skipped;
    reconfigures: it can join again under a new epoch; recovers: it outlives the death of a member.
    """

    entry: str
    text: str
    options: Mapping[str, Any] = field(default_factory=dict)
    copies: int = 1
    needs: tuple[str, ...] = ()
    reconfigures: bool = False
    recovers: bool = False


MPIRUN = "mpirun"


def _ftar(transport: str, text: str, *, registered: bool = False) -> Contender:
    options = {"transport": transport, "registered": registered}
    entry = "ft_hsdp.bench.contenders.allreduce:FTAR"
    return Contender(entry, text, options, copies=2, reconfigures=True, recovers=True)


CONTENDERS: dict[str, Contender] = {
    "tcp": _ftar("tcp", "FTAR over TCP, out of place"),
    "shm": _ftar("shm", "FTAR over shared memory, registered tensors, out of place", registered=True),
    "shm-any": _ftar("shm", "FTAR over shared memory, ordinary tensors, out of place"),
    "c10d": _ftar("c10d", "FTAR over torch.distributed's gloo (TCP), out of place"),
    "gloo": Contender(
        "ft_hsdp.bench.contenders.allreduce:Gloo", "torch.distributed.all_reduce over gloo, in place"
    ),
    "torchft": Contender(
        "ft_hsdp.bench.contenders.torchft:TorchFT",
        "torchft's ProcessGroupGloo, in place",
        needs=("torchft",),
        reconfigures=True,
    ),
    "openmpi": Contender(
        MPIRUN, "OpenMPI's Allreduce over shared memory, out of place", copies=2, needs=("mpi4py", "openmpi")
    ),
}


def absent(contender: Contender) -> str:
    """Why it cannot take part on this machine, "" if it can."""
    missing = [name for name in contender.needs if version(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if contender.entry == MPIRUN and mpirun() is None:
        return "mpirun was not found"
    return ""


def version(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def mpirun() -> str | None:
    """Path of the mpirun that belongs to this Python's OpenMPI."""
    return shutil.which("mpirun", path=str(Path(sys.executable).parent))

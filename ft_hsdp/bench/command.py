"""The benches by name, and what the user asks of each: from the words of a command line to a result.

Every function of this module raises ConfigError for what is not allowed.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TextIO, TypeVar

from ft_hsdp.bench.contenders.base import CONTENDERS
from ft_hsdp.bench.results import GIB, KIB, MIB
from ft_hsdp.config.running import MAX_REPLICAS
from ft_hsdp.errors import ConfigError

FTAR = ("bandwidth", "spin", "kill", "reconfigure", "link")
FETCH = ("large", "small")
RECOVERY = ("kill", "torchft", "rejoin", "return", "stop", "readers", "local")
ADOPT = ("step", "kill")
MEMORY = ("step", "none", "plan", "gaps", "lost", "union", "flips")
WIDTH = ("reshape", "allreduce", "blocks", "rate", "shrink", "lone", "losses")
UNITS = ("constant", "rate", "refill", "loss", "tokens", "kills")
KILLS = {"recovery": 200, "units": 50, "adopt": 7, "memory": 20, "width": 20}  # where the user does not say
OVERHEAD_ROUNDS = {"steady": 70, "snapshot": 30, "ray": 6, "link": 20}  # rounds where the user does not say
MEMORY_ROUNDS = {"step": 20, "none": 5, "gaps": 9}  # the same
OVERHEAD_BY_DEFAULT = ("steady", "snapshot", "ray")
FLIPS = 10_000  # bytes that `bench memory` flips
DRIVER_STEPS = 1_000_000  # where the user does not say
QUORUM_MEMBERS = (3, 12, 64)
LARGEST = 4 * GIB
MOST_MEMBERS = 16  # of a ring
MOST_ROUNDS = 10_000
_SIZE = re.compile(r"(\d{1,12}) ?([kmg]i?)?b?", re.IGNORECASE)
_UNITS = {"": 1, "k": KIB, "m": MIB, "g": GIB}

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class AllReduceOptions:
    """What `bench ftar` measures; None where each measure has its own."""

    measures: tuple[str, ...]
    sizes: tuple[int, ...] | None  # of messages, in bytes
    members: tuple[int, ...] | None
    contenders: tuple[str, ...] | None
    rounds: int


@dataclass(frozen=True, slots=True)
class QuorumOptions:
    """What `bench quorum` measures."""

    members: tuple[int, ...]  # how many clients ask at once
    rounds: int  # of each kind


@dataclass(frozen=True, slots=True)
class FetchOptions:
    """What `bench fetch` measures."""

    measures: tuple[str, ...]
    sizes: tuple[int, ...]  # of states in large tensors, in bytes
    rounds: int  # fetches of each contender


@dataclass(frozen=True, slots=True)
class RecoveryOptions:
    """What `bench recovery` measures."""

    measures: tuple[str, ...]
    kills: int  # SIGKILLs; torchft, long steps, returns and stops get fewer
    rounds: int  # of what is interleaved
    sizes: tuple[int, ...]  # of a state that is recovered locally, in bytes


@dataclass(frozen=True, slots=True)
class UnitsOptions:
    """What `bench units` measures."""

    measures: tuple[str, ...]
    kills: int  # SIGKILLs of each kind of batch; refill gets fewer
    rounds: int  # of what is interleaved


@dataclass(frozen=True, slots=True)
class AdoptOptions:
    """What `bench adopt` measures."""

    measures: tuple[str, ...]
    kills: int  # SIGKILLs in the example of each trainer
    rounds: int  # of what is interleaved


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """What `bench memory` measures."""

    measures: tuple[str, ...]
    kills: int  # lost hosts with copies in memory; fewer with checkpoints, and of two replicas at once
    rounds: Mapping[str, int]  # of each measure that interleaves
    flips: int = FLIPS  # bytes


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """What `bench tls` measures."""

    rounds: int  # of what is interleaved
    size: int  # of the fetched state, in bytes


@dataclass(frozen=True, slots=True)
class WidthOptions:
    """What `bench width` measures."""

    measures: tuple[str, ...]
    kills: int  # hosts that are lost
    rounds: int  # of what is interleaved
    sizes: tuple[int, ...]  # of states that go to another number of ranks, in bytes
    gradients: tuple[int, ...]  # of replicas that are not equally wide, in bytes


def ftar_options(args: Namespace) -> AllReduceOptions:
    """Return what `bench ftar` is to do."""
    return AllReduceOptions(
        measures_of(args.measure or "bandwidth", FTAR),
        sizes_of(args.sizes),
        _listed("--members", args.members, _members, f"2 to {MOST_MEMBERS}, e.g. 2,4"),
        _listed("--contenders", args.contenders, _contender, f"some of {','.join(CONTENDERS)}"),
        rounds_of(args, 20),
    )


def quorum_options(args: Namespace) -> QuorumOptions:
    """Return what `bench quorum` is to do."""
    allowed = f"numbers from 1 to {MAX_REPLICAS}, e.g. 12,64"
    members = _listed("--members", args.members or None, _clients, allowed, doubles=True)
    return QuorumOptions(members or QUORUM_MEMBERS, rounds_of(args, 300))


def fetch_options(args: Namespace) -> FetchOptions:
    """Return what `bench fetch` is to do."""
    return FetchOptions(
        measures_of(args.measure or "all", FETCH), sizes_of(args.sizes) or (GIB,), rounds_of(args, 7)
    )


def recovery_options(args: Namespace) -> RecoveryOptions:
    """Return what `bench recovery` is to do."""
    measures, kills = measures_of(args.measure or "all", RECOVERY), kills_of(args, "recovery")
    return RecoveryOptions(measures, kills, rounds_of(args, 5), sizes_of(args.sizes) or (256 * MIB,))


def units_options(args: Namespace) -> UnitsOptions:
    """Return what `bench units` is to do."""
    return UnitsOptions(measures_of(args.measure or "all", UNITS), kills_of(args, "units"), rounds_of(args, 4))


def memory_options(args: Namespace) -> MemoryOptions:
    """Return what `bench memory` is to do."""
    rounds = {name: rounds_of(args, default) for name, default in MEMORY_ROUNDS.items()}
    return MemoryOptions(measures_of(args.measure or "all", MEMORY), kills_of(args, "memory"), rounds)


def width_options(args: Namespace) -> WidthOptions:
    """Return what `bench width` is to do."""
    measures = measures_of(args.measure or "all", WIDTH)
    sizes = sizes_of(args.sizes)
    kills, rounds = kills_of(args, "width"), rounds_of(args, 9)
    return WidthOptions(measures, kills, rounds, sizes or (256 * MIB,), sizes or (64 * MIB,))


def adopt_options(args: Namespace) -> AdoptOptions:
    """Return what `bench adopt` is to do."""
    return AdoptOptions(measures_of(args.measure or "all", ADOPT), kills_of(args, "adopt"), rounds_of(args, 20))


def overhead_rounds(args: Namespace) -> Mapping[str, int]:
    """Return the rounds of each measure of `bench overhead` that is wanted."""
    wanted = measures_of(args.measure, tuple(OVERHEAD_ROUNDS)) if args.measure else OVERHEAD_BY_DEFAULT
    return {name: rounds_of(args, OVERHEAD_ROUNDS[name]) for name in wanted}


def strangers_rounds(args: Namespace) -> int:
    """Return how many windows `bench strangers` measures."""
    return rounds_of(args, 6)


def tls_options(args: Namespace) -> TlsOptions:
    """Return what `bench tls` is to do."""
    return TlsOptions(rounds_of(args, 9), (sizes_of(args.sizes) or (GIB,))[0])


def driver_steps(args: Namespace) -> int:
    """Return the steps of the job that `bench driver` makes up."""
    return DRIVER_STEPS if args.rounds is None else int(args.rounds)


def measures_of(word: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """Return the measures that are meant by ``word``."""
    if word not in (*known, "all"):
        raise ConfigError("--measure", word, f"{', '.join(known)} or all")
    return known if word == "all" else (word,)


def rounds_of(args: Namespace, default: int) -> int:
    """Return how often what is interleaved is repeated."""
    return count_of("--rounds", default if args.rounds is None else args.rounds)


def kills_of(args: Namespace, bench: str) -> int:
    """Return how often ``bench`` kills."""
    return count_of("--kills", KILLS[bench] if args.kills is None else args.kills)


def count_of(key: str, count: int) -> int:
    """Return a number of repetitions."""
    if not 1 <= count <= MOST_ROUNDS:
        raise ConfigError(key, count, f"1 to {MOST_ROUNDS}")
    return count


def sizes_of(text: str | None) -> tuple[int, ...] | None:
    """Return sizes in bytes."""
    return _listed("--sizes", text, _size, "multiples of 4 bytes up to 4GiB, e.g. 64KiB,1MiB")


def _listed(
    key: str, text: str | None, read: Callable[[str], _T | None], allowed: str, doubles: bool = False
) -> tuple[_T, ...] | None:
    """Return the words of a comma list, each read; a word that comes twice counts once unless ``doubles``."""
    if text is None:
        return None
    values: list[_T] = []
    for word in text.split(","):
        value = read(word.strip())
        if value is None:
            raise ConfigError(key, text, allowed)
        values.append(value)
    return tuple(values if doubles else dict.fromkeys(values))


def _size(word: str) -> int | None:
    match = _SIZE.fullmatch(word)
    if match is None:
        return None
    size = int(match[1]) * _UNITS[(match[2] or "")[:1].lower()]
    return size if 4 <= size <= LARGEST and size % 4 == 0 else None


def _members(word: str) -> int | None:
    return int(word) if re.fullmatch(r"\d{1,3}", word) and 2 <= int(word) <= MOST_MEMBERS else None


def _clients(word: str) -> int | None:
    return int(word) if word.isdecimal() and 1 <= int(word) <= MAX_REPLICAS else None


def _contender(word: str) -> str | None:
    return word if word in CONTENDERS else None


BENCHES: Mapping[str, tuple[str, Callable[[Namespace], Any]]] = {
    "ftar": ("allreduce", ftar_options),
    "quorum": ("quorum", quorum_options),
    "fetch": ("state_fetch", fetch_options),
    "recovery": ("recovery.bench", recovery_options),
    "overhead": ("overhead", overhead_rounds),
    "units": ("units.bench", units_options),
    "adopt": ("adopt", adopt_options),
    "memory": ("memory.bench", memory_options),
    "width": ("width.bench", width_options),
    "strangers": ("strangers", strangers_rounds),
    "tls": ("tls", tls_options),
    "driver": ("driver", driver_steps),
}
"""The module of each bench, imported only when it runs because it imports what it measures, and its options."""


def run_bench(name: str, args: Namespace, stream: TextIO) -> dict[str, Any]:
    """Run one bench, as the words of the command line say; progress goes to ``stream``.

    Returns:
        The result, ready for JSON.

    Raises:
        ConfigError: The words, or this machine, do not allow it.
        Retryable: A process fails.
        DataCorruption: A sum or a state is wrong.
    """
    module, options = BENCHES[name]
    result: dict[str, Any] = import_module(f"ft_hsdp.bench.{module}").run(options(args), stream)
    return result

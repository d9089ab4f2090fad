"""The benches by name, and the words of a command line: measures, sizes, and how often.

A module is imported when its bench runs, because it imports what it measures. Each function that reads a word
raises ConfigError for what is not allowed.
"""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, TypeVar

from ft_hsdp.errors import ConfigError

BENCHES: Mapping[str, str] = {
    "ftar": "allreduce",
    "quorum": "quorum",
    "fetch": "state_fetch",
    "recovery": "recovery",
    "overhead": "overhead",
    "return": "returns",
    "hosts": "hosts",
    "memory": "memory",
    "culprits": "culprits",
}

KIB, MIB, GIB = 2**10, 2**20, 2**30
LARGEST = 4 * GIB
MOST_ROUNDS = 10_000
_SIZE = re.compile(r"(\d{1,12}) ?([kmg]i?)?b?", re.IGNORECASE)
_UNITS = {"": 1, "k": KIB, "m": MIB, "g": GIB}

_T = TypeVar("_T")


def run_benches(args: Namespace) -> dict[str, dict[str, Any]]:
    """Run the benches that the command line names, and show what each found; progress goes to stderr.

    Returns:
        The results by bench, ready for JSON.

    Raises:
        ConfigError: The words, or this machine, do not allow it.
        Retryable: A process fails.
        DataCorruption: A sum or a state is wrong.
    """
    show = import_module("benchmarks.results").show
    results: dict[str, dict[str, Any]] = {}
    for what in dict.fromkeys(args.what):
        module = import_module(f"benchmarks.{BENCHES[what]}")
        results[what] = module.run(module.options(args), sys.stderr)
        show(results[what], sys.stderr if args.json else sys.stdout)
    return results


def measures_of(args: Namespace, known: tuple[str, ...]) -> tuple[str, ...]:
    """Return the measures that are meant, all of ``known`` or one."""
    word = args.measure or "all"
    if word not in (*known, "all"):
        raise ConfigError("--measure", word, f"{', '.join(known)} or all")
    return known if word == "all" else (word,)


def rounds_of(args: Namespace, default: int) -> int:
    """Return how often what is interleaved is repeated."""
    return _count("--rounds", default if args.rounds is None else args.rounds)


def kills_of(args: Namespace, default: int) -> int:
    """Return how often something is killed."""
    return _count("--kills", default if args.kills is None else args.kills)


def _count(key: str, count: int) -> int:
    if not 1 <= count <= MOST_ROUNDS:
        raise ConfigError(key, count, f"1 to {MOST_ROUNDS}")
    return count


def sizes_of(args: Namespace) -> tuple[int, ...] | None:
    """Return sizes in bytes; None where none were named."""
    return listed("--sizes", args.sizes, _size, "multiples of 4 bytes up to 4GiB, e.g. 64KiB,1MiB")


def listed(key: str, text: str | None, read: Callable[[str], _T | None], allowed: str) -> tuple[_T, ...] | None:
    """Return the words of a comma list, each read; a word that comes twice counts once."""
    if text is None:
        return None
    values: list[_T] = []
    for word in text.split(","):
        value = read(word.strip())
        if value is None:
            raise ConfigError(key, text, allowed)
        values.append(value)
    return tuple(dict.fromkeys(values))


def _size(word: str) -> int | None:
    match = _SIZE.fullmatch(word)
    if match is None:
        return None
    size = int(match[1]) * _UNITS[(match[2] or "")[:1].lower()]
    return size if 4 <= size <= LARGEST and size % 4 == 0 else None

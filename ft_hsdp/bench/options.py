"""What the words of a command line ask of a bench: measures, sizes, and how often.

Each function raises ConfigError for what is not allowed.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable
from typing import TypeVar

from ft_hsdp.bench.results import GIB, KIB, MIB
from ft_hsdp.errors import ConfigError

LARGEST = 4 * GIB
MOST_ROUNDS = 10_000
_SIZE = re.compile(r"(\d{1,12}) ?([kmg]i?)?b?", re.IGNORECASE)
_UNITS = {"": 1, "k": KIB, "m": MIB, "g": GIB}

_T = TypeVar("_T")


def measures_of(args: Namespace, known: tuple[str, ...], default: str = "all") -> tuple[str, ...]:
    """Return the measures that are meant, all of ``known`` or one."""
    word = args.measure or default
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


def listed(
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

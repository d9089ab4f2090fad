"""What a measure is to do, and where it tells how it goes.

What the user asked the bench for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO, TypeVar

from ft_hsdp.bench.contenders.roster import CONTENDERS, Contender
from ft_hsdp.errors import ConfigError

ResultRow = dict[str, Any]
"""One line of a result, ready for JSON."""


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """Ring sizes, message sizes in bytes, and how often."""

    members: tuple[int, ...]
    sizes: tuple[int, ...]
    rounds: int


@dataclass(slots=True)
class ProgressLog:
    """Progress goes to `stream` at once; notes belong to the result as well."""

    stream: TextIO
    notes: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        """Print one line at once."""
        self.stream.write(text + "\n")
        self.stream.flush()

    def note(self, text: str) -> None:
        """Print one line that a reader of the figures has to know, once."""
        if text not in self.notes:
            self.notes.append(text)
            self.say(f"note: {text}")


@dataclass(frozen=True, slots=True)
class Measure:
    """One thing that is measured.

    run: raises Retryable where a worker fails, DataCorruption where a sum is wrong; members, sizes and contenders:
    where the user names none; unfit: why a contender cannot take part, "" if it can.
    """

    run: Callable[[Mapping[str, Contender], BenchPlan, ProgressLog], list[ResultRow]]
    members: tuple[int, ...]
    sizes: tuple[int, ...]
    contenders: tuple[str, ...]
    unfit: Callable[[Contender], str] = lambda contender: ""


KIB, MIB, GIB = 2**10, 2**20, 2**30
MEASURES = ("bandwidth", "spin", "kill", "reconfigure", "link")
LARGEST = 4 * GIB
MOST_MEMBERS = 16
MOST_ROUNDS = 10_000
_SIZE = re.compile(r"(\d{1,12}) ?([kmg]i?)?b?", re.IGNORECASE)
_UNITS = {"": 1, "k": KIB, "m": MIB, "g": GIB}

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class AllReduceOptions:
    """measures: which; sizes in bytes, members, contenders: None where a measure has its own; rounds of each."""

    measures: tuple[str, ...]
    sizes: tuple[int, ...] | None
    members: tuple[int, ...] | None
    contenders: tuple[str, ...] | None
    rounds: int


def parse(
    measure: str, *, sizes: str | None, members: str | None, contenders: str | None, rounds: int
) -> AllReduceOptions:
    """Options from the words of a command line. Raises ConfigError."""
    return AllReduceOptions(
        measures_of(measure, MEASURES),
        sizes_of(sizes),
        _listed("--members", members, _members, f"2 to {MOST_MEMBERS}, e.g. 2,4"),
        _listed("--contenders", contenders, _contender, f"some of {','.join(CONTENDERS)}"),
        count_of("--rounds", rounds),
    )


def measures_of(word: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """The measures that are meant by `word`. Raises ConfigError."""
    if word not in (*known, "all"):
        raise ConfigError("--measure", word, f"{', '.join(known)} or all")
    return known if word == "all" else (word,)


def count_of(key: str, count: int) -> int:
    """A number of repetitions. Raises ConfigError."""
    if not 1 <= count <= MOST_ROUNDS:
        raise ConfigError(key, count, f"1 to {MOST_ROUNDS}")
    return count


def sizes_of(text: str | None) -> tuple[int, ...] | None:
    """Sizes in bytes. Raises ConfigError."""
    return _listed("--sizes", text, _size, "multiples of 4 bytes up to 4GiB, e.g. 64KiB,1MiB")


def size_name(size: int) -> str:
    """A number of bytes as people say it."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


def _listed(key: str, text: str | None, read: Callable[[str], _T | None], allowed: str) -> tuple[_T, ...] | None:
    """The words of a comma list, each read; doubles fall out."""
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


def _members(word: str) -> int | None:
    return int(word) if re.fullmatch(r"\d{1,3}", word) and 2 <= int(word) <= MOST_MEMBERS else None


def _contender(word: str) -> str | None:
    return word if word in CONTENDERS else None

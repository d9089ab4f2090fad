"""What a measure is to do, and where it tells how it goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

from ft_hsdp.bench.roster import Contender

Row = dict[str, Any]
"""One line of a result, ready for JSON."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Ring sizes, message sizes in bytes, and how often."""

    members: tuple[int, ...]
    sizes: tuple[int, ...]
    rounds: int


@dataclass(slots=True)
class Log:
    """Progress goes to `stream` at once; notes belong to the result as well."""

    stream: TextIO
    notes: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        """Print one line."""
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

    run: Callable[[Mapping[str, Contender], Plan, Log], list[Row]]
    members: tuple[int, ...]
    sizes: tuple[int, ...]
    contenders: tuple[str, ...]
    unfit: Callable[[Contender], str] = lambda contender: ""

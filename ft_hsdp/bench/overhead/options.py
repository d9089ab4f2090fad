"""What the user asked `bench overhead` for."""

from __future__ import annotations

from dataclasses import dataclass

from ft_hsdp.bench.options import count_of, measures_of

MEASURES = ("steady", "snapshot", "link")
USUAL = ("steady", "snapshot")


@dataclass(frozen=True, slots=True)
class Options:
    """measures: which; rounds: steps of each crew."""

    measures: tuple[str, ...]
    rounds: int


def parse(measure: str | None, *, rounds: int) -> Options:
    """Options from the words of a command line; without a measure the usual ones. Raises ConfigError."""
    return Options(measures_of(measure, MEASURES) if measure else USUAL, count_of("--rounds", rounds))

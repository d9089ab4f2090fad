"""What the user asked `bench fetch` for."""

from __future__ import annotations

from dataclasses import dataclass

from ft_hsdp.bench.options import GIB, count_of, measures_of, sizes_of

MEASURES = ("large", "small")
SIZES = (GIB,)


@dataclass(frozen=True, slots=True)
class Options:
    """measures: which; sizes: of states in large tensors, in bytes; rounds: takes of each contender."""

    measures: tuple[str, ...]
    sizes: tuple[int, ...]
    rounds: int


def parse(measure: str, *, sizes: str | None, rounds: int) -> Options:
    """Options from the words of a command line. Raises ConfigError."""
    return Options(measures_of(measure, MEASURES), sizes_of(sizes) or SIZES, count_of("--rounds", rounds))

"""What the user asked `bench recovery` for."""

from __future__ import annotations

from dataclasses import dataclass

from ft_hsdp.bench.options import MIB, count_of, measures_of, sizes_of

MEASURES = ("kill", "torchft", "rejoin", "return", "stop", "readers", "local")
SIZES = (256 * MIB,)


@dataclass(frozen=True, slots=True)
class Options:
    """measures: which; kills: SIGKILLs, of which torchft, long steps, returns and stops get fewer.

    rounds: of what is interleaved; sizes: of a state that is recovered locally, in bytes.
    """

    measures: tuple[str, ...]
    kills: int
    rounds: int
    sizes: tuple[int, ...]


def parse(measure: str, *, kills: int, rounds: int, sizes: str | None) -> Options:
    """Options from the words of a command line. Raises ConfigError."""
    return Options(
        measures_of(measure, MEASURES),
        count_of("--kills", kills),
        count_of("--rounds", rounds),
        sizes_of(sizes) or SIZES,
    )

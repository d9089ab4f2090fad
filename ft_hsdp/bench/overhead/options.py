"""What the user asked `bench overhead` for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ft_hsdp.bench.options import count_of, measures_of

ROUNDS = {"steady": 70, "snapshot": 30, "ray": 6, "link": 20}
"""How often each measure is repeated where the user does not say."""
MEASURES = tuple(ROUNDS)
USUAL = ("steady", "snapshot", "ray")


@dataclass(frozen=True, slots=True)
class Options:
    """rounds: of each measure that is wanted: steps of each crew, or turns of each launcher."""

    rounds: Mapping[str, int]


def parse(measure: str | None, *, rounds: int | None) -> Options:
    """Options from the words of a command line; without a measure the usual ones. Raises ConfigError."""
    wanted = measures_of(measure, MEASURES) if measure else USUAL
    given = None if rounds is None else count_of("--rounds", rounds)
    return Options({name: given or ROUNDS[name] for name in wanted})

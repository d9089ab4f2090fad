"""What the user asked `bench quorum` for."""

from __future__ import annotations

from dataclasses import dataclass

from ft_hsdp.bench.options import count_of
from ft_hsdp.config.running import MAX_REPLICAS
from ft_hsdp.errors import ConfigError

MEMBERS = (3, 12, 64)


@dataclass(frozen=True, slots=True)
class Options:
    """members: how many clients ask at once; rounds: of each kind."""

    members: tuple[int, ...]
    rounds: int


def parse(*, members: str | None, rounds: int) -> Options:
    """Options from the words of a command line. Raises ConfigError."""
    return Options(_members(members) if members else MEMBERS, count_of("--rounds", rounds))


def _members(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and 1 <= int(word) <= MAX_REPLICAS for word in words):
        raise ConfigError("--members", text, f"numbers from 1 to {MAX_REPLICAS}, e.g. 12,64")
    return tuple(int(word) for word in words)

"""Work of the user's loop that is no training and no hang: announced, so that nobody blames the rank for it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ft_hsdp.errors import ConfigError

MAX_PAUSE = 80  # characters of what a pause is for


@dataclass(eq=False)
class Pauses:
    """The pause that the main thread makes, if there is one. Any thread may ask."""

    ended: int = 0  # how many there were
    _now: tuple[str, float] | None = None  # what it is for, and until when it may last

    def begin(self, what: str, limit_s: float) -> None:
        """Note that the main thread does something else, which is no hang for ``limit_s`` seconds."""
        if self._now is not None:
            raise ConfigError("job.pause", what, f"one pause at a time; {self._now[0]} is under way")
        self._now = what, time.monotonic() + limit_s

    def end(self) -> None:
        self._now = None
        self.ended += 1

    def left_s(self) -> float:
        """Return for how many seconds the pause may go on; 0: there is none, or it has lasted for too long."""
        now = self._now
        return 0.0 if now is None else max(0.0, now[1] - time.monotonic())

    @property
    def what(self) -> str:
        """What the pause is for; "" if there is none, or if it has lasted for too long."""
        now = self._now
        return now[0] if now is not None and self.left_s() else ""


def checked_pause(what: object, limit_s: object, longest_s: float) -> tuple[str, float]:
    """Return what a pause is for, and how long it may last."""
    if not isinstance(what, str) or not 0 < len(what) <= MAX_PAUSE or not what.isprintable():
        raise ConfigError("job.pause", what, f"1 to {MAX_PAUSE} characters that say what it does")
    limit = longest_s if limit_s is None else limit_s
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit <= longest_s:
        allowed = f"more than 0, and at most timeouts.pause_s ({longest_s:g})"
        raise ConfigError("job.pause(limit_s)", limit, allowed)
    return what, limit

"""The name of an incarnation: one life of a replica, from the start of its processes until all of them are gone.

Each start of a replica is a new incarnation, with a name that no other one has: REPLICA-RUN-RESTARTS, such as
`2-5eed0a1b-3`. RUN names the supervisor (or torchrun's job) that started it. A supervisor starts the next
incarnation only when all processes of the one before have exited, so within one run a greater number of restarts
means a later life. Runs have no order among themselves; the lighthouse orders those (lighthouse/quorum).

What travels and is written down is always the text. This module is the only one that builds it or takes it apart.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

PATTERN = "[0-9]{1,3}-[!-~]{1,200}"
"""The regular expression of every name that is accepted; ASCII without spaces."""

_NAME = re.compile(PATTERN)


@dataclass(frozen=True, slots=True)
class IncarnationId:
    """Which life of which replica; `str` gives its name."""

    replica: int
    run_id: str  # TORCHELASTIC_RUN_ID of its ranks: the supervisor's name, or "run" in a job without one
    restarts: int  # TORCHELASTIC_RESTART_COUNT of its ranks: how many incarnations of this run came before

    def __str__(self) -> str:
        """Return the name, REPLICA-RUN-RESTARTS."""
        return f"{self.replica}-{self.run_id}-{self.restarts}"

    @classmethod
    def parse(cls, text: str) -> IncarnationId | None:
        """Return the incarnation of this name; None if it is not a name.

        The number of restarts may be missing: `0-abc` is read as `0-abc-0`. So keep the text where it is
        compared or sent on.
        """
        if _NAME.fullmatch(text) is None:
            return None
        replica, _, rest = text.partition("-")
        run_id, _, restarts = rest.rpartition("-")
        if not restarts.isdecimal():
            run_id, restarts = rest, "0"
        return cls(int(replica), run_id, int(restarts))

    @property
    def previous(self) -> IncarnationId | None:
        """The incarnation of the same run just before this one; None if this is the first."""
        return replace(self, restarts=self.restarts - 1) if self.restarts else None

"""Whether a lost host can take a shard of the newest state with it, as the replicas say. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

_GONE = frozenset({"ReplicaExited", "ExitReported"})


@dataclass(frozen=True, slots=True)
class Protected:
    """What is known of the newest state."""

    word: Literal["", "protected", "unprotected"]  # "": no replica has said it yet
    why: str
    copies: int | None  # hosts that each shard is on, at least; None: not known
    apart: str  # host, rack or zone: what those copies do not share


class Protection:
    """What replicas have said of the copies of the state. One that says it is not protected is believed."""

    def __init__(self) -> None:
        self._good: Protected | None = None  # the newest that was said
        self._bad: dict[int, Protected] = {}  # by replica, until it says otherwise or is gone

    def event(self, name: str, row: Mapping[str, Any]) -> None:
        """Take an event of a replica."""
        replica, why, apart = int(row["replica"]), str(row.get("reason", "")), str(row.get("apart", "host"))
        if name == "Protected":
            copies = row.get("copies")
            self._bad.pop(replica, None)
            self._good = Protected("protected", why, copies if isinstance(copies, int) else None, apart)
        elif name == "Unprotected":
            self._bad[replica] = Protected("unprotected", why, None, apart)
        elif name in _GONE:
            self._bad.pop(replica, None)

    def newest(self) -> Protected:
        """Return what is known now."""
        if self._bad:
            return self._bad[min(self._bad)]
        return self._good or Protected("", "", None, "host")

"""Whether a lost host can take a shard of the newest state with it, as the replicas say. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

_GONE = frozenset({"ReplicaExited", "ExitReported"})


@dataclass(frozen=True, slots=True)
class Protected:
    word: Literal["", "protected", "unprotected"]  # "": no replica that is left has said it
    why: str
    copies: int | None  # hosts that each shard is on, at least; None: not known
    apart: str  # host, rack or zone: what those copies do not share


class Protection:
    """What replicas have said of the copies of the state. One that says it is not protected is believed.

    That the state is protected holds while a replica that contributes is left: those that are left say so if
    they lack copies. Without one nobody knows what the hosts still hold.
    """

    def __init__(self) -> None:
        self._good: Protected | None = None  # the newest that was said
        self._bad: dict[int, Protected] = {}  # by replica, until it says otherwise or is gone
        self._contributors: Collection[int] = ()  # of the newest commit
        self._left: set[int] = set()  # of these and of those that have said something, who is not gone
        self._gone: dict[int, float] = {}  # when each replica was gone last, in Unix seconds

    def event(self, name: str, row: Mapping[str, Any]) -> None:
        """Take an event of a replica; it may come late."""
        replica, why, apart = int(row["replica"]), str(row.get("reason", "")), str(row.get("apart", "host"))
        if name in _GONE:
            self._gone[replica] = max(row["t"], self._gone.get(replica, row["t"]))
            self._bad.pop(replica, None)
            self._left.discard(replica)
            self._contributors = ()
            if not self._left:
                self._good = None
        elif name in ("Protected", "Unprotected") and not self._before_gone(replica, row["t"]):
            self._left.add(replica)
            if name == "Unprotected":
                self._bad[replica] = Protected("unprotected", why, None, apart)
                return
            copies = row.get("copies")
            self._bad.pop(replica, None)
            self._good = Protected("protected", why, copies if isinstance(copies, int) else None, apart)

    def commit(self, t: float, contributors: Collection[int]) -> None:
        if contributors != self._contributors:
            self._contributors = contributors
            self._left = {replica for replica in contributors if not self._before_gone(replica, t)}

    def newest(self) -> Protected:
        if self._bad:
            return self._bad[min(self._bad)]
        return self._good or Protected("", "", None, "host")

    def _before_gone(self, replica: int, t: float) -> bool:
        return t <= self._gone.get(replica, 0.0)

"""EtcdStore: the durable state of a job in etcd, for the lighthouse that leads."""

from __future__ import annotations

from ft_hsdp.core import lineage
from lighthouse.election import Election
from lighthouse.etcd import Etcd, EtcdRefused, EtcdUnreachable
from lighthouse.state import State
from lighthouse.store import FORMAT, JsonStore, Rows, StoreFailed

_FORMAT = "format"


class Deposed(StoreFailed):
    """This lighthouse does not lead any more, or cannot know that it does."""


class EtcdStore(JsonStore):
    """Rows below ``prefix``, each "DIGEST JSON"; each write is one transaction that only the leader's key lets in.

    A write that nobody answered may have happened: this lighthouse then no longer knows what is durable, and is
    deposed for good. Raises Deposed, too, where nothing would be written: a decision is the leader's alone.
    """

    def __init__(self, etcd: Etcd, prefix: str, election: Election) -> None:
        super().__init__()
        self._etcd = etcd
        self._prefix = f"{prefix}/durable/"
        self._election = election
        self._doubt = ""

    def unsaved(self, state: State) -> frozenset[str]:
        """See `Store`. Raises Deposed."""
        if self._doubt or not self._election.holds:
            raise Deposed(f"this lighthouse does not lead any more{self._doubt and f': {self._doubt}'}")
        return super().unsaved(state)

    def close(self) -> None:
        """See `Store`; who resigns lets another lighthouse have it."""

    def _read(self) -> tuple[int, Rows]:
        try:
            found = self._etcd.below(self._prefix)
        except EtcdUnreachable as error:
            raise Deposed(str(error)) from error
        except EtcdRefused as error:
            raise self._unusable(str(error)) from None
        texts = {key.removeprefix(self._prefix): entry.value for key, entry in found.items()}
        rows: Rows = {}
        for name, text in texts.items():
            digest, _, rows[name] = text.partition(" ")
            if digest != lineage.digest(name, rows[name]):
                raise self._unusable(f"{name} is damaged")
        kept = rows.pop(_FORMAT, "0")
        return (int(kept) if kept.isdecimal() else 0), rows

    def _write(self, rows: Rows) -> None:
        texts = {**rows, _FORMAT: str(FORMAT)}
        values = {self._prefix + n: f"{lineage.digest(n, text)} {text}" for n, text in texts.items()}
        try:
            led = self._etcd.put_if(self._election.key, self._election.revision, values)
        except EtcdUnreachable as error:
            self._doubt = f"a write may be lost or not ({error})"
            raise Deposed(f"lighthouse store {self._name}: {self._doubt}") from error
        except EtcdRefused as error:
            raise StoreFailed(f"lighthouse store {self._name}: {error}") from error
        if not led:
            self._doubt = "another one does"
            raise Deposed(f"lighthouse store {self._name}: another lighthouse leads")

    @property
    def deposed(self) -> str:
        """Why nothing can be written any more; "" while it can."""
        return self._doubt

    @property
    def _least_term(self) -> int:
        return self._election.revision

    @property
    def _name(self) -> str:
        return f"etcd {self._prefix}"

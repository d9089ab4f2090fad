"""The part of `Job` for `ft_hsdp.BlockStore`: where the rank's state agent is, and a way to note events."""

from __future__ import annotations

import logging
import time

from ft_hsdp.errors import ConfigError
from ft_hsdp.jsonl import Journal
from ft_hsdp.train.identity import RankIdentity, RankPlace
from ft_hsdp.train.state.snapshots import AgentHome

_log = logging.getLogger(__name__)


class BlockHost:
    """What a store of blocks asks of the job that it belongs to; `Job` is one."""

    def __init__(self, place: RankPlace, identity: RankIdentity | None) -> None:
        self._place = place
        self._identity = identity
        self._events: Journal | None = None
        self._early: list[tuple[float, str, str, dict[str, object]]] = []  # events from before there is a journal

    def agent_home(self, caller: str) -> AgentHome | None:
        """Return where this rank's state agent is. Does not block.

        Returns:
            The agent of this rank's host, or None in a replay, which has no agents.

        Raises:
            ConfigError: This process is a spare, and of no replica yet.
        """
        place, identity = self._place, self._identity
        if not place.lighthouses:
            return None
        if identity is None:
            raise ConfigError(caller, "a spare", "a call in the loop: before the first batch it is of no replica")
        return AgentHome(place.token, identity.replica, place.rank, place.ranks, identity.starter, identity.shared)

    def note_event(self, event: str, reason: str, **facts: object) -> None:
        """Write an event into the journal of this rank, once there is one.

        It also becomes a line of the rank's log. From any thread.
        """
        _log.warning("%s: %s", event, reason)
        if self._events is not None:
            self._events.event(event, reason, **facts)
        else:
            self._early.append((time.time(), event, reason, facts))

    def _write_events(self, journal: Journal) -> None:
        """Write the events of before, and those that follow, into this rank's journal."""
        self._events = journal
        while self._early:
            at, event, reason, facts = self._early.pop(0)
            journal.note(at, event, reason, **facts)

"""Failpoints: places at which a leader can be made to fail, for tests. Off unless the configuration names them.

``debug.failpoints`` maps a name to {"replicas": [ids], "step": n}; each fires once in a process.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ft_hsdp.core.commit import Token
from ft_hsdp.core.events import Event, RingBroken
from ft_hsdp.core.replica import Replica
from ft_hsdp.errors import ConfigError

NAMES = ("verdict.stop", "record.lost")


class Failpoints:
    """The failpoints of one replica's leader.

    ``verdict.stop``: SIGSTOP itself with the verdict decided and before anybody hears of it.
    ``record.lost``: forget the record in doubt when the ring breaks, as a loss of memory would.
    """

    def __init__(self, configured: Mapping[str, Any], replica: int) -> None:
        """Take the failpoints of ``replica``. Raises ConfigError on an unknown name."""
        unknown = sorted(set(configured) - set(NAMES))
        if unknown:
            raise ConfigError(f"debug.failpoints.{unknown[0]}", configured[unknown[0]], ", ".join(NAMES))
        self._steps = {name: int(at["step"]) for name, at in configured.items() if replica in at["replicas"]}

    def _hit(self, name: str, step: int) -> bool:
        if self._steps.get(name) != step:
            return False
        del self._steps[name]
        return True

    def verdict(self, token: Token) -> None:
        """A token is about to be sent."""
        if token.verdict and self._hit("verdict.stop", token.fence.step):
            os.kill(os.getpid(), signal.SIGSTOP)

    def record_lost(self, replica: Replica, event: Event) -> Replica:
        """An event is about to be handled."""
        if isinstance(event, RingBroken) and replica.forwarded and self._hit("record.lost", replica.fence.step):
            return replace(replica, forwarded=False, record=None)
        return replica

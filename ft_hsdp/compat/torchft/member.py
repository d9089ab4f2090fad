"""Member: this process's communicator, kept through all quorums, with its buffers and edges."""

from __future__ import annotations

import dataclasses
import secrets

from ft_hsdp.ftar import Communicator, Settings
from ft_hsdp.ftar.lifecycle import GroupState


class Member:
    """A number that no other process has, a secret that the ranks of a ring share, and the communicator of both.

    torchft's ranks change with every quorum, so the ring knows its members by number.
    """

    def __init__(self, settings: Settings) -> None:
        self.number = secrets.randbits(48)
        self.token = secrets.token_hex(16)
        self.epoch = 0
        self._settings = settings
        self._communicator: Communicator | None = None

    @property
    def communicator(self) -> Communicator:
        """The communicator of the last `admit`."""
        assert self._communicator is not None, "process group not initialized"
        return self._communicator

    def admit(self, token: str, host: str, timeout_s: float) -> tuple[int, str]:
        """Be a member by the secret ``token``; the number and the "host:port" where the others call."""
        settings = dataclasses.replace(
            self._settings,
            timeout_s=timeout_s,
            connect_timeout_s=min(timeout_s, self._settings.connect_timeout_s),
        )
        old = self._communicator
        useless = old is not None and old.state in (GroupState.FATAL, GroupState.CLOSED)
        if useless or token != self.token or settings != self._settings:
            self.close()
        self.token, self._settings = token, settings
        if self._communicator is None:
            self._communicator = Communicator(self.number, token=token, host=host, settings=settings)
        return self.number, self._communicator.address

    def abort(self, reason: str) -> None:
        """Give up whatever ring there is."""
        if self._communicator is not None:
            self._communicator.abort(reason)

    def close(self) -> None:
        """Leave the ring and end the threads; `admit` begins again."""
        old, self._communicator = self._communicator, None
        if old is not None:
            old.close()

"""A rank's way to the leader of its replica, to the other ranks of it, and to the lighthouse.

Rank 0 has the leader, a connection to each other rank and one to the lighthouse (`RankZero`). The other ranks have
one connection, to rank 0, which passes on what is for the lighthouse. `ReplicaLink` is the same on all ranks: what
a rank reports is a call on rank 0 and a message elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ft_hsdp.config import Config
from ft_hsdp.control.leader import Leader
from ft_hsdp.control.rank_channel import RankLine
from ft_hsdp.control.telemetry import Reporter
from ft_hsdp.core.commit import CommitToken
from ft_hsdp.core.grant import Holders
from ft_hsdp.errors import LighthouseUnreachable
from ft_hsdp.protocol import RankAlive, RankHello, Telemetry
from ft_hsdp.train.identity import RankIdentity, RankPlace
from ft_hsdp.train.rank_zero import RankZero


class ReplicaLink:
    """The connections of one rank within its replica. All methods are for the control loop."""

    def __init__(
        self, config: Config, place: RankPlace, taken: Callable[[object], None], lost: Callable[[str], None]
    ) -> None:
        """Make the link of a rank; nothing is connected before `listen`.

        Args:
            config: The job's configuration.
            place: Where this rank runs.
            taken: Takes the leader's orders, and each sign of life of another rank.
            lost: Takes in one line why this rank has to end: a connection to another rank has ended.
        """
        self.zero: RankZero | None = None  # on rank 0, from `listen` on
        self._config = config
        self._place = place
        self._taken = taken
        self._lost = lost
        self._line: RankLine | None = None  # on the other ranks, once they have checked in
        self._reporter: Reporter | None = None

    @property
    def leader(self) -> Leader | None:
        """The leader, on rank 0 once all ranks have checked in."""
        return None if self.zero is None else self.zero.leader

    async def listen(self) -> int:
        """On rank 0, call the lighthouse, and return the port where the other ranks find their leader; else 0."""
        if self._place.rank:
            return 0
        self.zero = RankZero(self._config, self._place, self.report, self._rank_lost)
        return await self.zero.hub.listen(self._place.leader_host)

    def start(self, identity: RankIdentity, reporter: Reporter) -> None:
        """Become the link of a rank of one incarnation.

        Args:
            identity: Which one.
            reporter: Takes what other ranks have for the lighthouse.
        """
        self._reporter = reporter
        reporter.start()
        if self.zero is not None:
            self.zero.start(identity)

    async def connect(self, port: int, hello: RankHello) -> None:
        """Connect to the leader on rank 0; on the other ranks.

        Args:
            port: Of the leader, on rank 0's host.
            hello: Of this rank.

        Raises:
            TimeoutError: Not within `timeouts.ranks_s`.
        """
        line = RankLine(self._place.token, self._taken, self._leader_lost)
        async with asyncio.timeout(self._config.timeouts.ranks_s):
            await line.connect(self._place.leader_host, port, hello)
        self._line = line

    async def holders(self, replica: int, wait_s: float) -> Holders | None:
        """Ask the lighthouse where copies of the newest state may be. On rank 0; takes about ``wait_s``."""
        assert self.zero is not None
        return await self.zero.client.find_holders(replica, wait_s)

    def report(self, message: object) -> None:
        """Give the leader a message: a call on rank 0, where the other ranks' messages arrive here, too."""
        if isinstance(message, RankAlive):
            self._taken(message)
        elif isinstance(message, Telemetry):
            if self._reporter is not None:
                self._reporter.relay(message)
        elif (leader := self.leader) is not None:
            leader.received(message)
        elif self._line is not None:
            self._line.send(message)

    async def tell_lighthouse(self, telemetry: Telemetry) -> None:
        """Send telemetry: rank 0 to the lighthouse, the other ranks to rank 0.

        Raises:
            LighthouseUnreachable: It cannot be sent now.
        """
        if self.zero is not None:
            await self.zero.client.tell(telemetry)
        elif self._line is not None:
            self._line.tell(telemetry)
        else:
            raise LighthouseUnreachable("this rank has not found its leader yet")

    def broadcast(self, message: object) -> None:
        """Send the other ranks a message; on the others, send it to rank 0."""
        if self.zero is not None:
            self.zero.hub.broadcast(message)
        elif self._line is not None:
            self._line.send(message)

    def token_came(self, token: CommitToken) -> None:
        """Give the leader a commit token of the ring of rank 0."""
        if (leader := self.leader) is not None:
            leader.token(token)

    async def close(self) -> None:
        """Close all connections, and end the leader."""
        if self.zero is not None:
            await self.zero.close()
        if self._line is not None:
            self._line.close()

    def _rank_lost(self, rank: int) -> None:
        self._lost(f"rank {rank} of this replica is gone")

    def _leader_lost(self) -> None:
        self._lost("the leader of this replica is gone")

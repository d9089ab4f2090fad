"""A rank's way to its leader, to the other ranks of its replica and to the lighthouse: the seam `Bus`.

Rank 0 has the leader, a connection to each other rank and one to the lighthouse (`RankZero`). It calls the
lighthouse and listens to the other ranks before it is known which incarnation they are of, and makes the `Leader`
when all of them have checked in. The other ranks have one connection, to rank 0, which passes on what is for the
lighthouse (`OtherRank`). So what a rank tells its leader is a call on rank 0 and a message elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ft_hsdp import protocol, tls
from ft_hsdp.config import Config
from ft_hsdp.control import leader as control
from ft_hsdp.control.leader import Leader, LeaderSettings
from ft_hsdp.control.lighthouse_client import MARGIN_S, LighthouseClient
from ft_hsdp.control.rank_channel import RankHub, RankLine
from ft_hsdp.control.telemetry import Reporter
from ft_hsdp.core.commit import CommitToken
from ft_hsdp.core.replica_state import DEFAULT, ReplicaPolicy, other_data
from ft_hsdp.errors import EXIT_RETRYABLE, ConfigError, LighthouseUnreachable
from ft_hsdp.jsonl import Journal
from ft_hsdp.protocol import RankAlive, RankHello, Telemetry
from ft_hsdp.train.identity import RankIdentity, RankPlace

WRITES = 2  # x timeouts.load_s: for a checkpoint; ranks that wait for each other have given up by then


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """What the ranks of a replica tell each other when they start; the same on all of them, by rank."""

    port: int  # of the leader, on rank 0's host
    weights: tuple[str, ...]  # digests of the initial shards
    layouts: tuple[str, ...]  # digests of the layouts
    machines: int = 0  # on how many hosts the ranks are, if each host's are in one space of pids; else 0
    pids: tuple[int, ...] = ()  # of the ranks on this one's host, if it is the first of them
    data: Mapping[str, str] = field(default_factory=dict)  # facts of the data


def same_data(told: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return all facts about the data that the ranks of a replica have told."""
    for rank, theirs in enumerate(told):
        for before, mine in enumerate(told[:rank]):
            if (found := other_data(theirs, mine)) is not None:
                name, got, other = found
                allowed = f"{other}, as on rank {before}: all ranks need the same data"
                raise ConfigError(f"data: {name} on rank {rank} of the replica", got, allowed)
    return {name: value for theirs in reversed(told) for name, value in theirs.items()}


class RankZero:
    """The leader of a replica, and its way to the lighthouse and to the other ranks. On rank 0's control loop.

    It is the leader's `control.rank_channel.RankBus`.
    """

    def __init__(
        self, config: Config, place: RankPlace, ordered: Callable[[object], None], end: Callable[[str, int], None]
    ) -> None:
        """Call the lighthouse. Does not block.

        Args:
            ordered: Takes what its leader orders, and the signs of life of the other ranks.
            end: Ends this process: takes the reason in one line, and the exit code.
        """
        self._config = config
        self._place = place
        self._ordered = ordered
        self.end = end
        context, reply_s = tls.client(config.network), config.timeouts.ask_s + MARGIN_S
        self.client = LighthouseClient(place.lighthouses, place.token, context, place.listed, reply_s)
        self.hub = RankHub(place.ranks, place.token, self._received, self._lost)
        self.leader: Leader | None = None  # once all ranks have checked in
        self._greeting = asyncio.get_running_loop().create_task(self.client.greet())
        self._identity: RankIdentity  # set by `start`
        self._reporter: Reporter
        self._burial: asyncio.Task[None] | None = None

    def start(self, identity: RankIdentity, reporter: Reporter) -> None:
        """Become rank 0 of one incarnation, and tell the lighthouse that those before it have exited."""
        self._identity = identity
        self._reporter = reporter
        if identity.restarts:
            self._burial = asyncio.get_running_loop().create_task(self._bury_predecessors())

    async def lead(
        self,
        about: protocol.QuorumRequest,
        wanted: int,
        policy: ReplicaPolicy,
        send_token: Callable[[CommitToken], None],
        journal: Journal,
    ) -> None:
        """Make the leader and start it; all ranks are here. Waits until the earlier incarnations are reported.

        Args:
            wanted: A checkpoint of a state of so many steps or more is demanded; 0: none.
        """
        config, identity = self._config, self._identity
        number, name, state = identity.replica, identity.incarnation, about.report.state
        settings = leader_settings(config, self._place.ranks, restarted=identity.restarts > 0)
        replica = control.initial(number, name, config.train.steps, state, policy, wanted)
        self.leader = Leader(replica, about, self.client, settings, self, send_token, journal)
        if self._burial is not None:
            await self._burial
        self.leader.start()

    def to_leader(self, message: object) -> None:
        if self.leader is not None:
            self.leader.received(message)

    def to_ranks(self, message: object) -> None:
        self.hub.broadcast(message)

    def broadcast(self, order: object) -> None:
        self.hub.broadcast(order)
        self._ordered(order)

    async def tell(self, telemetry: Telemetry) -> None:
        await self.client.tell(telemetry)

    async def close(self) -> None:
        if self.leader is not None:
            self.leader.close()
        await self.client.close()
        self.hub.close()

    def _received(self, message: object) -> None:
        if isinstance(message, RankAlive):
            self._ordered(message)
        elif isinstance(message, Telemetry):
            self._reporter.relay(message)
        else:
            self.to_leader(message)

    def _lost(self, rank: int) -> None:
        self.end(f"rank {rank} of this replica is gone", EXIT_RETRYABLE)

    async def _bury_predecessors(self) -> None:
        """Tell the lighthouse that the earlier incarnations have exited: a restart ends them first."""
        with contextlib.suppress(LighthouseUnreachable):  # the first ask will find out
            await self.client.report(protocol.ProcessReport(self._identity.incarnation))


class OtherRank:
    """The way of the other ranks: a connection to rank 0, once they check in. On their control loop."""

    def __init__(
        self, place: RankPlace, ordered: Callable[[object], None], end: Callable[[str, int], None]
    ) -> None:
        self._place = place
        self._end = end
        self._line = RankLine(place.token, ordered, self._lost)
        self._connected = False

    async def connect(self, port: int, hello: RankHello, wait_s: float) -> None:
        """Connect to rank 0, whose hub listens at ``port``.

        Raises:
            TimeoutError: Not within ``wait_s`` seconds.
        """
        async with asyncio.timeout(wait_s):
            await self._line.connect(self._place.leader_host, port, hello)
        self._connected = True

    def to_leader(self, message: object) -> None:
        """Send rank 0 a message; before check-in it is lost."""
        if self._connected:
            self._line.send(message)

    to_ranks = to_leader  # rank 0 alone hears of the others

    async def tell(self, telemetry: Telemetry) -> None:
        """Have rank 0 send telemetry to the lighthouse."""
        if not self._connected:
            raise LighthouseUnreachable("this rank has not found its leader yet")
        self._line.tell(telemetry)

    async def close(self) -> None:
        if self._connected:
            self._line.close()

    def _lost(self) -> None:
        self._end("the leader of this replica is gone", EXIT_RETRYABLE)


Bus = RankZero | OtherRank
"""What a rank has of its replica: `to_leader`, `to_ranks` and `tell`, on rank 0 and elsewhere alike."""


def replica_policy(config: Config, sums_bytes: int) -> ReplicaPolicy:
    """Return what the core of a replica needs to know of ``config``.

    Args:
        sums_bytes: Of the reduced shards of a step, on one rank.
    """
    steps = min(DEFAULT.catchup_log_steps, config.quorum.catchup_log_bytes // sums_bytes)
    return ReplicaPolicy(config.checkpoint.every, max(1, steps), config.train.poison, config.keeps_last)


def leader_settings(config: Config, ranks: int, *, restarted: bool) -> LeaderSettings:
    """Return what a leader needs to know of ``config``.

    Args:
        restarted: Whether the replica was started again: then the leader waits for the lighthouse without an end.
    """
    timeouts = config.timeouts
    return LeaderSettings(
        ranks=ranks,
        intervention=config.lr.intervention,
        chunk_bytes=config.ftar.chunk_bytes or 0,
        lease_s=config.quorum.lease_s,
        answer_wait_s=timeouts.answer_wait_s,
        join_timeout_s=None if restarted else timeouts.reach_s,
        token_timeout_s=config.ftar.timeout_s,
        catchup_wait_s=config.quorum.catchup_wait_s,
        reach_s=timeouts.reach_s,
        leave_s=timeouts.leave_s,
        write_s=WRITES * timeouts.load_s,
        write_again_s=timeouts.checkpoint_again_s,
        checkpoint_s=config.checkpoint_s,
        ranks_per_unit=config.ranks_per_unit,
        norm_mads=config.train.norm_mads,
        nominal=config.data_ranks,
    )

"""What rank 0 has beside what every rank has: the leader of its replica, and the connections that it needs.

`RankZero` calls the lighthouse and listens to the other ranks before it is known which incarnation they are of.
It makes the `Leader` when all of them have checked in.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ft_hsdp import protocol, tls
from ft_hsdp.config import Config, agreed, config_hash
from ft_hsdp.control import exit_watch
from ft_hsdp.control import leader as control
from ft_hsdp.control.leader import Leader, LeaderSettings
from ft_hsdp.control.lighthouse_client import LighthouseClient
from ft_hsdp.control.rank_channel import RankBus, RankHub
from ft_hsdp.core.commit import CommitToken
from ft_hsdp.core.grant import Report, ranges
from ft_hsdp.core.replica_state import ReplicaPolicy, other_data
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import ConfigError, LighthouseUnreachable
from ft_hsdp.jsonl import Journal
from ft_hsdp.protocol import RankHello
from ft_hsdp.train.identity import RankIdentity, RankPlace

WRITES = 2  # x timeouts.load_s: for a checkpoint; ranks that wait for each other have given up by then


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """What the ranks of a replica tell each other when they start; the same on all of them, by rank."""

    port: int  # of the leader, on rank 0's host
    weights: tuple[str, ...]  # digests of the initial shards
    layouts: tuple[str, ...]  # digests of the layouts
    pids: tuple[int, ...] = ()  # of all ranks, if they share one machine
    data: Mapping[str, str] = field(default_factory=dict)  # facts of the data


def same_data(told: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return all facts about the data that the ranks of a replica have told.

    Raises:
        ConfigError: Two ranks differ.
    """
    for rank, theirs in enumerate(told):
        for before, mine in enumerate(told[:rank]):
            if (found := other_data(theirs, mine)) is not None:
                name, got, other = found
                allowed = f"{other}, as on rank {before}: all ranks need the same data"
                raise ConfigError(f"data: {name} on rank {rank} of the replica", got, allowed)
    return {name: value for theirs in reversed(told) for name, value in theirs.items()}


@dataclass(frozen=True, slots=True)
class CheckIn:
    """With what a replica joins the job."""

    hello: RankHello  # of rank 0
    state: StateId  # that its ranks hold
    wanted: int  # a checkpoint of a state of so many steps or more is demanded; 0: none
    facts: ReplicaFacts
    numerics: str  # what the bits of its results depend on
    frozen: str  # digest of what the model has beside the state
    layout: str  # digest of the layouts of its ranks, or of what stays the same with fewer ranks


class RankZero:
    """The leader of a replica, and its way to the lighthouse and to the other ranks. On rank 0's control loop."""

    def __init__(
        self,
        config: Config,
        place: RankPlace,
        received: Callable[[object], None],
        lost: Callable[[int], None],
    ) -> None:
        """Call the lighthouse. Does not block.

        Args:
            config: The job's configuration.
            place: Where rank 0 runs.
            received: Takes what the other ranks send.
            lost: Called with the number of a rank whose connection has ended.
        """
        self._config = config
        self._place = place
        context, ask_s = tls.client(config.network), config.timeouts.ask_s
        self.client = LighthouseClient(place.lighthouses, place.token, context, place.listed, ask_s)
        self.hub = RankHub(place.ranks, place.token, received, lost)
        self.leader: Leader | None = None  # once all ranks have checked in
        self._greeting = asyncio.get_running_loop().create_task(self.client.greet())
        self._identity: RankIdentity  # set by `start`
        self._burial: asyncio.Task[None] | None = None

    def start(self, identity: RankIdentity) -> None:
        """Become rank 0 of one incarnation, and tell the lighthouse that those before it have exited."""
        self._identity = identity
        if identity.predecessors:
            self._burial = asyncio.get_running_loop().create_task(self._bury_predecessors())

    async def lead(
        self, replica: CheckIn, bus: RankBus, send_token: Callable[[CommitToken], None], journal: Journal
    ) -> None:
        """Make the leader and start it; all ranks are here. Waits until the earlier incarnations are reported.

        Args:
            replica: With what it joins the job.
            bus: Where orders to the ranks go.
            send_token: Passes the commit token to the right neighbour in the ring of rank 0.
            journal: Where decisions are written.
        """
        self._have_exits_reported(replica.facts.pids)
        self.leader = self._make_leader(replica, bus, send_token, journal)
        if self._burial is not None:
            await self._burial
        self.leader.start()

    async def close(self) -> None:
        """Close the connections to the lighthouse and to the other ranks, and end the leader."""
        if self.leader is not None:
            self.leader.close()
        await self.client.close()
        self.hub.close()

    def _make_leader(
        self, replica: CheckIn, bus: RankBus, send_token: Callable[[CommitToken], None], journal: Journal
    ) -> Leader:
        config, identity = self._config, self._identity
        hellos = [replica.hello, *(self.hub.hellos[r] for r in range(1, self._place.ranks))]
        train, every = config.train, config.checkpoint.every
        policy = ReplicaPolicy(
            every, config.quorum.catchup_log_steps, train.poison, config.keeps_last, train.poison_retries
        )
        request = protocol.QuorumRequest(
            Report(identity.replica, identity.incarnation, replica.state, 1),
            tuple(h.ring for h in hellos),
            tuple(h.state for h in hellos),
            config_hash(config),
            replica.layout,
            replica.numerics,
            agreed(config),
            replica.frozen,
            ranges(h.host for h in hellos),
            dict(replica.facts.data),
        )
        number, name = identity.replica, identity.incarnation
        return Leader(
            control.initial(number, name, train.steps, replica.state, policy, replica.wanted),
            request,
            self.client,
            leader_settings(config, self._place.ranks, restarted=bool(identity.predecessors)),
            bus,
            send_token,
            journal,
        )

    def _have_exits_reported(self, pids: tuple[int, ...]) -> None:
        """Start a process that tells the lighthouse when all ranks of this replica are gone.

        Under our own supervisor that is its task; another launcher does not do it.
        """
        place, folder = self._place, self._place.run / "replicas" / str(self._identity.replica)
        if place.parent is None or not pids:
            return
        watched = exit_watch.Watched(
            self._identity.incarnation,
            pids,
            place.lighthouses,
            place.token,
            str(folder / "final.json"),
            None if place.listed is None else str(place.listed),
            self._config.network,
            self._config.timeouts.reach_s,
        )
        self._exit_watch = exit_watch.start(watched, folder / "exit-watch.log")

    async def _bury_predecessors(self) -> None:
        """Tell the lighthouse that the earlier incarnations have exited: a restart ends them first."""
        identity = self._identity
        running: dict[int, str | None] = {identity.replica: identity.incarnation}
        with contextlib.suppress(LighthouseUnreachable):  # the first ask will find out
            await self.client.report(protocol.ProcessReport(running, identity.predecessors))


def leader_settings(config: Config, ranks: int, *, restarted: bool) -> LeaderSettings:
    """Return what a leader needs to know of ``config``.

    Args:
        config: The job's configuration.
        ranks: That its replica has now.
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
        nominal=config.data_ranks,
    )

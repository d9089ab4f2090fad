"""What is done about a failure, which spare host takes the place of a lost one, and who goes on without it.

DeadPool §VI-B (Table II) sorts failures by what removes them: a repair in place, another host, or the people who
run the job. Here the evidence is how the ranks of a replica ended and what else is known about their host. A reset
connection ends no rank and is not decided here: the next epoch forms the ring again. In §V-C a spare takes the
logical place of a lost host, and nothing else moves: the other ranks start again where their memory is. The ranks
that then check in must be one gang. Without a spare host a replica may go on on the hosts that it has left
(ReStore's shrinking recovery); it gets hosts again once all replicas run, the smallest one first. A replica that
cannot go on lends the hosts that it has left: they are spare for the others until it has hosts for all its ranks
again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import EXIT_HARDWARE
from ft_hsdp.memory.hosts import Host, Level

MOVE_AFTER = 3  # failures on one host since the replica was healthy, while other replicas train
HALT_AFTER = 3  # times that one step ended all replicas


class Action(Enum):
    """What is done about a failure."""

    SAME_HOST = "start the replica's ranks again where they were"
    OTHER_HOST = "start the ranks of this host on another one"
    HALT = "end the job with a reason"


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known about one failure of a replica."""

    exit_code: int | None = None  # of the first rank that ended; negative: the signal; None: none has
    host_lost: bool = False  # its ranks and its agent are gone, or the scheduler says that it is
    failures_here: int = 0  # on this host since the replica was healthy, this one included
    others_train: bool = False  # another replica has committed a step meanwhile
    all_ended_at: int = 0  # how often all replicas have ended at this very step


@dataclass(frozen=True, slots=True)
class Decision:
    """What is done, and whether the host is used again."""

    action: Action
    cordoned: bool  # nothing is started on this host until an operator says so
    reason: str


def decide(evidence: Evidence) -> Decision:
    """Return what is done about a failure. The first rule that applies counts."""
    if evidence.all_ended_at >= HALT_AFTER:
        return Decision(Action.HALT, False, f"the same step has ended all replicas {evidence.all_ended_at} times")
    if evidence.exit_code == EXIT_HARDWARE:  # also if a host is lost: that one may come back, and be used again
        return Decision(Action.OTHER_HOST, True, "a rank or the kernel found the host broken")
    if evidence.host_lost:
        return Decision(Action.OTHER_HOST, False, "the host is lost")
    if evidence.failures_here >= MOVE_AFTER and evidence.others_train:
        return Decision(
            Action.OTHER_HOST, True, f"{evidence.failures_here} failures on this host while other replicas trained"
        )
    return Decision(Action.SAME_HOST, False, "nothing says that the host is broken")


@dataclass(frozen=True, slots=True)
class Assignment:
    """Which hosts a replica runs on."""

    hosts: tuple[Host, ...]  # in the order of its ranks; those that live are where they were
    missing: tuple[int, ...]  # positions in `hosts` whose host is lost and has no successor: the replica waits

    def left(self, ranks_per_host: int, least: int | None) -> tuple[Host, ...]:
        """Return the hosts on which the replica goes on without the missing ones; (): it has to wait.

        Args:
            ranks_per_host: Ranks on each host.
            least: Fewest ranks with which it goes on (`memory.shrink_to`); None: it always waits.
        """
        left = tuple(host for i, host in enumerate(self.hosts) if i not in self.missing)
        return () if least is None or not left or len(left) * ranks_per_host < least else left

    def with_hosts(self, chosen: Mapping[int, Host]) -> Assignment:
        return Assignment(tuple(chosen.get(i, host) for i, host in enumerate(self.hosts)), ())

    def without(self, position: int, lost: Host) -> Assignment:
        """Return this with a lost host in a position whose host is lent."""
        hosts = (*self.hosts[:position], lost, *self.hosts[position + 1 :])
        return Assignment(hosts, tuple(sorted({*self.missing, position})))


def assign(
    replicas: Mapping[int, Sequence[Host]],
    lost: Collection[str],
    spares: Sequence[Host],
    level: Level,
    shrunk: Mapping[int, int] | None = None,
    lenders: Collection[int] = (),
    serves: Callable[[str, int], bool] = lambda host, replica: True,
) -> dict[int, Assignment]:
    """Give the places of lost hosts to spare hosts, and then to hosts of replicas that lend theirs.

    A host that lives stays. Replicas that do not run come first, and of them those that need the fewest hosts;
    then those that go on with fewer ranks, the smallest first. A replica gets hosts only if there are enough for
    all its ranks. Of the spares, one whose domain has no other copy of the lost shards is best; next, one that is
    near the rest of the replica, whose collectives need the most bandwidth.

    Hosts are lent only where the spares do not suffice, and first by the replica that needs the most hosts itself.
    The lender takes the lost hosts into its places: it waits for them, or for others, and gets none back from the
    borrower. So each host is in one place, and no more replicas wait than before.

    Args:
        replicas: the hosts of each replica, in the order of its ranks. Hosts in the same position hold the same
            shards.
        lost: names of hosts that are lost or cordoned.
        spares: hosts without ranks that live.
        level: what copies must not share.
        shrunk: on how many hosts each replica runs that goes on with fewer ranks.
        lenders: replicas that do not run, and whose living hosts may be lent while others of theirs are lost.
        serves: whether a host may have ranks of a replica.

    Returns:
        The hosts of each replica. No host is given twice.
    """
    shrunk = shrunk or {}
    free = [host for host in spares if host.name not in lost]
    result = {
        replica: Assignment(tuple(hosts), tuple(i for i, host in enumerate(hosts) if host.name in lost))
        for replica, hosts in replicas.items()
    }

    def fill(replica: int, hosts: Sequence[Host], lent: Mapping[Host, int]) -> dict[int, Host]:
        """Return which of the hosts go to which position of a replica; those in ``lent`` last."""
        given, rest = result[replica], list(hosts)
        chosen: dict[int, Host] = {}
        stay = [host for i, host in enumerate(given.hosts) if i not in given.missing]
        for position in given.missing:
            same_shards = [
                other[position]
                for n, other in replicas.items()
                if n != replica and position < len(other) and other[position].name not in lost
            ]
            near = [*stay, *chosen.values()]
            chosen[position] = min(
                rest,
                key=lambda host: (
                    lent.get(host, 0),
                    any(host.domain(level) == other.domain(level) for other in same_shards),
                    sum(host.distance(other) for other in near),
                    host,
                ),
            )
            rest.remove(chosen[position])
        return chosen

    order = sorted(replicas, key=lambda each: (shrunk.get(each, 0), len(result[each].missing), each))
    for replica in order:
        mine = [host for host in free if serves(host.name, replica)]
        if len(result[replica].missing) <= len(mine):
            chosen = fill(replica, mine, {})
            free = [host for host in free if host not in chosen.values()]
            result[replica] = result[replica].with_hosts(chosen)
    for replica in order:
        if not result[replica].missing:
            continue
        whose = {
            host: (n, position)
            for n in lenders
            if n != replica and result[n].missing
            for position, host in enumerate(result[n].hosts)
            if position not in result[n].missing and serves(host.name, replica)
        }
        mine = [host for host in free if serves(host.name, replica)]
        if len(result[replica].missing) > len(mine) + len(whose):
            continue
        ranked = sorted({n for n, _ in whose.values()}, key=lambda n: (-len(result[n].missing), -n))
        chosen = fill(replica, [*mine, *whose], {host: 1 + ranked.index(n) for host, (n, _) in whose.items()})
        free = [host for host in free if host not in chosen.values()]
        for position, host in chosen.items():
            if host in whose:
                lender, place = whose[host]
                result[lender] = result[lender].without(place, result[replica].hosts[position])
        result[replica] = result[replica].with_hosts(chosen)
    return dict(sorted(result.items()))


@dataclass(frozen=True, slots=True)
class RankClaim:
    rank: int
    ranks: int
    incarnation: str
    host: str  # the name that its launcher gave it; "" if it did not
    hosts: tuple[str, ...]  # where the replica was placed, by rank; (): nobody has said it
    state: StateId


def disagreement(claims: Sequence[RankClaim]) -> str:
    """Return in one line how the ranks of a replica contradict each other; "": they do not.

    They are one gang of one width on the hosts on which it was placed, each shard has one rank, and all hold one
    state (DeadPool §V-C, I1, I2 and I4). Under torchrun and other launchers nobody has said where the replica was
    placed, and hosts are not compared.

    I3, that every shard is in memory, is not compared here: what was lost cannot be brought back by a comparison,
    and a rank may rightly hold an older state than its agent, of which another shard is lost. I3 is held while the
    replica trains: a vote waits for the copies of the state before it, and a state with fewer is `Unprotected`.

    Args:
        claims: Of all ranks, in the order of the process group.
    """
    first = claims[0]
    for place, claim in enumerate(claims):
        who = f"rank {claim.rank}"
        if (claim.rank, claim.ranks) != (place, len(claims)):
            return f"{who} of {claim.ranks} is in the place of rank {place} of {len(claims)}"
        if claim.incarnation != first.incarnation:
            return f"{who} is of incarnation {claim.incarnation}, rank 0 of {first.incarnation}"
        if claim.hosts != first.hosts:
            return f"{who} was placed on hosts {', '.join(claim.hosts)}, rank 0 on {', '.join(first.hosts)}"
        if claim.hosts and claim.hosts[place : place + 1] != (claim.host,):
            return f"{who} is on host {claim.host}, and was placed on {', '.join(claim.hosts[place : place + 1])}"
        if claim.state != first.state:
            return f"{who} holds {claim.state}, rank 0 holds {first.state}"
    return ""

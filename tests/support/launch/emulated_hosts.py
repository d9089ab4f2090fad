"""Which emulated host each rank is on, which hosts are spare, and who takes the place of one that is lost. Pure.

With `hosts.per_replica` one machine stands for several hosts. Replica 0 begins on r0h0, r0h1 and so on. The spare
hosts are s0, s1 and so on; the last ones of them are those of spare replicas. A host that is lost, by the kind
`host` of chaos, or that is cordoned, leaves its ranks to a spare host (DeadPool §V-C). Nothing else moves: the
other ranks start again where their memory is. A host that comes back is spare. Without a spare host a replica may
go on on the hosts that it has left, or lend these to other replicas. The hosts of a replica that is drained or
given up are spare for the others, after all spare hosts; if it comes back, it has those that nobody took.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ft_hsdp.memory.hosts import Host, Level
from ft_hsdp.memory.replacement import Assignment, assign
from ft_hsdp.train.identity import HOST_VARIABLE, host_path


@dataclass(frozen=True, slots=True)
class HostSwap:
    """A spare host takes the place of another one, or one that another replica lends does."""

    lost: str
    spare: str
    ranks: tuple[int, ...]
    lender: int | None = None


class EmulatedHosts:
    """The hosts for which one machine stands: so many of each replica, with equal numbers of ranks, and spares.

    Without `per_replica` the machine stands for no host but itself, and nothing here does anything.
    """

    def __init__(
        self,
        per_replica: int | None = None,
        ranks: int = 1,
        spare: int = 0,
        of_spares: int = 0,
        labels: Mapping[str, str] | None = None,
        level: Level = "rack",
    ) -> None:
        """Make the hosts.

        Args:
            per_replica: Hosts of each replica; None: the machine itself.
            ranks: Of each replica; `per_replica` divides it.
            spare: Spare hosts.
            of_spares: Hosts of spare replicas, which are taken after those.
            labels: `hosts.labels`, which say where hosts stand.
            level: What the copies of a shard must not share, if there is a choice.
        """
        self.per_replica = per_replica
        self._each = ranks // per_replica if per_replica else ranks  # ranks of a host
        self._labels = dict(labels or {})
        self._level: Level = level
        self._hosts: dict[int, list[str]] = {}  # of each replica that was asked for, by position
        count = spare + of_spares if per_replica is not None else 0
        self._spare = [f"s{n}" for n in range(count)]  # hosts that no replica has, in the order in which they go
        self._last = set(self._spare[spare:])  # of spare replicas
        self.cordoned: dict[str, str] = {}  # host -> why it gets no ranks any more
        self._left: set[str] = set()  # hosts that were lost: their ranks go elsewhere, if there is where
        self._shrunk: dict[int, list[str]] = {}  # the hosts of replicas that go on with fewer ranks
        self._vacated: dict[int, list[str]] = {}  # as `_hosts`, of replicas that are drained or given up
        self._lenders: set[int] = set()  # replicas that have waited long enough for hosts of their own

    def of(self, replica: int) -> tuple[str, ...]:
        """Return the host of each rank of a replica; () without emulated hosts."""
        return tuple(name for name in self._used(replica) for _ in range(self._each))

    def lose(self, replica: int, down: Collection[str]) -> tuple[str, ...]:
        """Note which hosts are down now, and return those of a replica that are.

        Also a host that is back before its replica starts again has lost its memory: its ranks move.
        """
        lost = tuple(name for name in self._used(replica) if name in down)
        self._left.update(lost)
        return lost

    def cordon(self, name: str, reason: str) -> None:
        """Give a host no ranks any more, for the life of the job."""
        self.cordoned[name] = reason

    def free(self, down: Collection[str]) -> list[str]:
        """Return the spare hosts that can be used, in the order in which they are taken."""
        vacated = (name for hosts in self._vacated.values() for name in hosts)
        return [name for name in (*self._spare, *vacated) if name not in down and name not in self.cordoned]

    def vacate(self, replica: int) -> None:
        """Let other replicas have the hosts of one that needs none, or not now."""
        self._shrunk.pop(replica, None)
        self._lenders.discard(replica)
        if replica in self._hosts:
            self._vacated[replica] = self._hosts.pop(replica)

    def spare_for(self, host: str, down: Collection[str]) -> bool:
        """Return whether a spare host is left for ``host`` once all others that wait for one have it."""
        used = {name for names in self._hosts.values() for name in names}
        waiting = used & {*down, *self.cordoned, *self._left} - {host}
        return len(self.free(down)) > len(waiting)

    @property
    def may_wait(self) -> bool:
        """Return whether a replica without a host may get one later, or has others that it can lend meanwhile."""
        return self.per_replica is not None and (self.per_replica > 1 or bool(self._spare))

    def can_lose(self, replica: int, host: str, down: Collection[str], least: int | None) -> bool:
        """Return whether a replica has ``least`` ranks without ``host``; False if that is None."""
        left = [name for name in self._of(replica) if name not in {host, *down, *self.cordoned}]
        return least is not None and len(left) * self._each >= max(least, 1)

    def kept_ready(self, down: Collection[str]) -> list[str]:
        """Return the spare hosts whose state agent runs: those that neither a replica nor a spare one had."""
        return [name for name in self.free(down) if name in self._spare and name not in self._last]

    def place(self, replica: int, down: Collection[str], others: Collection[int]) -> list[HostSwap] | None:
        """Move the ranks of lost hosts of a replica to spare ones.

        Args:
            replica: The replica, which has no processes.
            down: Hosts that are down now.
            others: Replicas that wait for a host, too.

        Returns:
            What moved; None: the replica has to wait, because it needs more hosts than there are.
        """
        if self.per_replica is None:
            return None if down else []
        given = self._whole(replica, down, others)
        if given is None:
            return None
        self._shrunk.pop(replica, None)
        self._lenders.discard(replica)
        return self._move(replica, given)

    def could_grow(self, replica: int, down: Collection[str], others: Collection[int]) -> bool:
        """Return whether a replica that goes on with fewer ranks could have all of them; as `place`."""
        return replica in self._shrunk and self._whole(replica, down, others, runs=True) is not None

    def shrink(self, replica: int, down: Collection[str], others: Collection[int], least: int) -> int:
        """Place a replica on the hosts that it has left, because it gets no others; it lends them no more.

        Args:
            replica: The replica, which has no processes and no place.
            down: As for `place`; so are the ``others``.
            others: Replicas that wait for a host, too.
            least: Fewest ranks with which it goes on.

        Returns:
            How many ranks it has there; 0: it has to wait, because they are too few, or `place` has all of them.
        """
        if self.per_replica is None:
            return 0
        given = self._assign(replica, {*down, *self.cordoned}, down, others)
        left = given.left(self._each, least) if given.missing else ()
        if left:
            self._shrunk[replica] = [host.name for host in left]
            self._lenders.discard(replica)
        return len(left) * self._each

    def lend(self, replica: int) -> None:
        """Let other replicas have the hosts of one that waits for others, until it has a place."""
        self._lenders.add(replica)
        self._shrunk.pop(replica, None)  # it does not run: hosts go to it before they go to those with fewer ranks

    def vacancy(self, replica: int, down: Collection[str]) -> str:
        """Return in words why a replica has no place; "": it has one."""
        away = [f"host {name} is down, by chaos" for name in sorted({*down} & {*self._of(replica)})]
        away += [f"host {name} is cordoned" for name in sorted(self.cordoned.keys() & {*self._of(replica)})]
        spare = f"spare hosts: {', '.join(self.free(down)) or 'none'}"
        return ", ".join([*away, *([spare] if away and (self._spare or self._vacated) else [])])

    def _used(self, replica: int) -> list[str]:
        """Return the hosts on which a replica runs, by position; without those that it goes on without."""
        return self._shrunk.get(replica) or self._vacated.get(replica) or self._of(replica)

    def _whole(
        self, replica: int, down: Collection[str], others: Collection[int], runs: bool = False
    ) -> Assignment | None:
        """Return hosts for all ranks of a replica; None: there are too few. What others lend comes last."""
        gone = {*down, *self.cordoned}
        for lost, lenders in (({*gone, *self._left}, set()), (gone, set()), (gone, self._lenders & {*others})):
            given = self._assign(replica, lost, down, others, lenders, runs)
            if not given.missing:
                return given
        return None

    def _of(self, replica: int) -> list[str]:
        if self.per_replica is None:
            return []
        if replica in self._vacated:
            self._hosts[replica] = self._vacated.pop(replica)
        return self._hosts.setdefault(replica, [f"r{replica}h{n}" for n in range(self.per_replica)])

    def _host(self, name: str) -> Host:
        return Host.parse(host_path(self._labels, {HOST_VARIABLE: name}))

    def _assign(
        self,
        replica: int,
        lost: Collection[str],
        down: Collection[str],
        others: Collection[int],
        lenders: Collection[int] = (),
        runs: bool = False,
    ) -> Assignment:
        """Return the hosts of a replica, with those of spare replicas only if the spare hosts do not suffice.

        Args:
            replica: The replica.
            lost: Hosts that are not used.
            down: As for `place`; so are the ``others``.
            others: Replicas that wait for a host, too.
            lenders: Those of them whose hosts may be lent.
            runs: The replica has processes: it runs with fewer ranks, and those that do not run come before it.
        """
        self._of(replica)
        everyone: dict[int, Sequence[Host]] = {
            n: [self._host(h) for h in hosts] for n, hosts in self._hosts.items()
        }
        # The hosts on which a replica trains are no candidates, but say where the other copies are. One with fewer
        # ranks wants others in place of those that it has lost, and may come first.
        alive = [n for n in everyone if n != replica and n not in others]
        gone = {*lost} - {name for n in alive for name in self._used(n)}
        running = {*alive, replica} if runs else {*alive}
        shrunk = {n: len(hosts) for n, hosts in self._shrunk.items() if n in running}
        given, more = (
            assign(
                everyone,
                gone,
                [self._host(name) for name in spares],
                self._level,
                shrunk=shrunk,
                lenders=lenders,
            )[replica]
            for spares in (self.kept_ready(down), self.free(down))
        )
        return more if given.missing else given

    def _move(self, replica: int, given: Assignment) -> list[HostSwap]:
        hosts, each = self._of(replica), self._each
        swaps = []
        for position, host in enumerate(given.hosts):
            before = hosts[position]
            if host.name == before:
                self._left.discard(before)
                continue
            places = {**self._hosts, **self._vacated}
            owner = next((n for n, names in places.items() if host.name in names), None)
            hosts[position] = host.name
            if owner is not None:
                theirs = places[owner]
                theirs[theirs.index(host.name)] = before  # for which a lender waits now
            else:
                self._spare.remove(host.name)
                self._last.discard(host.name)
                self._spare.append(before)  # once it is back
            self._left.discard(before)
            lender = owner if owner in self._hosts else None
            swaps.append(HostSwap(before, host.name, tuple(range(position * each, (position + 1) * each)), lender))
        return swaps

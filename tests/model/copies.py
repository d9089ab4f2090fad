"""The copies of the state in host memory, in every order of snapshots, pulls, votes and lost hosts.

What decides is the product's own code (`copy_model`). Everything else is as short as it can be: replicas commit
together, and a replica that has lost a host ends at once as a whole, comes back behind the others, and is healthy
from the next commit on. A spare host takes the place of a lost one; without one, the lost host comes back empty.

What must hold:

- After a commit that says that the state before it is kept, that state is on as many hosts apart as there are
  copies.
- As long as fewer failure domains are lost than there are copies, a job whose ranks are all dead comes back with
  that state or a newer one. As long as no host is lost, it comes back with the newest state of which all ranks had
  a snapshot when they voted.
- Without a further disturbance the second commit that has to say so says so again, and one in `every` has to.
  That a host refuses a shard disturbs one commit, as long as another host of the replica can have it.
- The ranks that train are one gang: one start, on the hosts on which it was placed, one rank for each shard, one
  state (DeadPool, I1, I2 and I4). No rank is placed on a lost host, and no two on one.

Explore `LARGE` with `python -m tests.model.copies`: about 370,000 states, half a minute.
"""

import sys
from collections.abc import Iterator
from functools import partial

from ft_hsdp.memory.copies import Plan
from tests.model.copy_model import CopyModel
from tests.model.copy_world import CopyBounds, CopyWorld, Move, Step, has
from tests.model.explore import search

LARGE = CopyBounds(hosts=3, spares=1, losses=2, steps=2)
"""Slots, placement and votes of one replica through two lost hosts, with a spare one."""


class CopySpace(CopyModel):
    """What can happen to the copies of a job."""

    def patience(self, w: CopyWorld) -> Iterator[Move]:
        """Yield the votes that wait no longer for their copies."""
        for i, live in enumerate(w.live):
            if live == w.head and self.waits(w, i):
                yield f"{self._name(w, i)} waits no longer for copies of {live}", partial(self.hurry, w, i)

    def successors(self, w: CopyWorld) -> Iterator[Move]:
        """Yield everything that can happen in `w`."""
        if self.finished(w):
            return
        plan = self.plan(w)
        for i, live in enumerate(w.live):
            if live is not None:
                yield from self.of_rank(w, i, live, plan)
        yield from self._of_pulls(w, plan)
        voting = [i for i, live in enumerate(w.live) if live is not None and w.healthy[i // self.bounds.hosts]]
        if (
            w.head[1] < self.bounds.steps
            and voting
            and all(w.live[i] == w.head and w.votes[i] is not None for i in voting)
        ):
            yield "a step is committed", partial(self.commit, w, voting, plan)
        yield from self._of_starts(w)
        yield from self._of_losses(w)

    def _name(self, w: CopyWorld, i: int) -> str:
        return self._hosts[w.places[i]].name

    def of_rank(self, w: CopyWorld, i: int, live: Step, plan: Plan) -> Iterator[Move]:
        name = self._name(w, i)
        if live != w.head:
            yield f"{name} applies {w.head}", partial(self.hear, w, i)
            return
        own = has(w, w.places[i], i, live)
        if not own and not w.skipped[i]:
            yield f"{name} copies its shard of {live}", partial(self.snapshot, w, i, live)
            if w.skips:
                yield f"{name} leaves out its copy of {live}", partial(self.skip, w, i)
        if self.waits(w, i):
            owed = self.owners(plan, w.places[i]) if self.is_copied(w, plan, live) else []
            kept = own and all(has(w, w.places[i], owner, live) for owner in owed)
            hopeless = any(w.skipped[owner] for owner in owed)
            refused = w.refusing & {(owner, w.places[i]) for owner in owed}
            if kept or w.skipped[i] or hopeless or refused:
                voted = self.vote(w, i, kept, refused if own else ())
                yield f"{name} votes, and {'keeps' if kept else 'lacks'} {live}", lambda: voted
            elif w.hurries:
                hurried = self.hurry(w, i)._replace(hurries=w.hurries - 1)
                yield f"{name} votes without the copies of {live}", lambda: hurried

    def _of_pulls(self, w: CopyWorld, plan: Plan) -> Iterator[Move]:
        for copy in plan.copies:
            holder, owner = self._number[copy.holder.name], self.number(copy)
            state = w.live[w.places.index(holder)] if holder in w.places else None
            if (
                state is None
                or not self.is_copied(w, plan, state)
                or (holder, owner, state) in w.pulls
                or (owner, holder) in w.refusing
                or not has(w, w.places[owner], owner, state)
                or has(w, holder, owner, state)
            ):
                continue
            begun = partial(self.pull, w, holder, owner, state)
            yield f"{copy.holder.name} begins to copy {self._name(w, owner)}'s shard of {state}", begun
            if w.refusals:
                refused = partial(self.refuse, w, holder, owner)
                yield f"{copy.holder.name} has no room for {self._name(w, owner)}'s shard of {state}", refused
        for holder, owner, state in sorted(w.pulls):
            done = partial(self.pulled, w, holder, owner, state)
            yield f"{self._hosts[holder].name} has {self._name(w, owner)}'s shard of {state}", done

    def _of_starts(self, w: CopyWorld) -> Iterator[Move]:
        """Yield what replicas do that have no ranks, and what may come between."""
        dead = [r for r in range(self.bounds.replicas) if any(w.live[i] is None for i in self.ranks(r))]
        if any(w.healthy):
            for r in dead:
                yield f"replica {r} returns behind the others", partial(self.rejoin, w, r)
        else:
            yield "the job is restored", partial(self.restore, w)
        for r in dead if w.strays else ():
            for told, seat, claim in self.strays(w, r):
                yield told, partial(self.stray, w, r, seat, claim)

    def _of_losses(self, w: CopyWorld) -> Iterator[Move]:
        for domain in {host.domain(self.bounds.level): 0 for host in self._hosts} if w.losses else ():
            gone = [
                i
                for i, host in enumerate(self._hosts)
                if host.domain(self.bounds.level) == domain and i not in w.down
            ]
            if gone:
                yield f"{' '.join(domain).strip()} is lost", partial(self.lose, w, gone)
        for i, host in enumerate(self._hosts):
            if w.partitions and i not in w.down:
                yield f"{host.name} is cut off", partial(self.lose, w, [i], cut_off=True)
            if i in w.down and i not in w.places and any(i == each for each, _ in w.aside):
                yield f"{host.name} comes back with what it had", partial(self.come_back, w, i)
        for r in range(self.bounds.replicas if w.crashes else 0):
            if all(w.live[i] is not None for i in self.ranks(r)):
                yield f"all ranks of replica {r} end", partial(self.crash, w, r)


def main() -> None:
    """Explore `LARGE` and print what was found."""
    sys.stdout.write(f"{search(CopySpace(LARGE), limit_s=600)}\n")


if __name__ == "__main__":
    main()

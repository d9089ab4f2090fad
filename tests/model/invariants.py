"""What must hold in every world that can be reached. Each function raises Violation where it does not.

They look at the content of replicas, which no core knows, so an identity that lies is found.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NoReturn

from ft_hsdp.core import state_id
from ft_hsdp.core.commit import CommitRecord
from ft_hsdp.core.grant import Answer, Grant, Refused
from ft_hsdp.core.ledger import Run
from ft_hsdp.core.replica_state import Phase, Replica
from ft_hsdp.core.state_id import StateId
from ft_hsdp.core.units import Places, UnitPolicy
from ft_hsdp.memory.lanes import lanes
from tests.model.world import Content, Flip, Kept, same_run, weight

EPOCHS_WITHOUT_A_STEP = 12
TENSORS = {"a": ((10, 4), 4), "b": ((7,), 4), "c": ((4, 5), 4)}  # each can be cut for up to 4 ranks


class Violation(Exception):
    """A safety property does not hold; the message names it."""


def exactly_once(r: int, before: Content, units: Iterable[tuple[int, int]], holes: int) -> None:
    """Check that no unit counts twice and at most `holes` are left out when replica `r` applies `units`."""
    inside = {(shard, index) for step in before for shard, index, _ in step}
    for shard, index in sorted(units):
        if (shard, index) in inside:
            raise Violation(f"exactly once: replica {r} applies unit {index} of data shard {shard} once more")
        inside.add((shard, index))
    ends = dict(sorted(inside))
    out = [(s, i) for s, end in ends.items() for i in range(end) if (s, i) not in inside]
    if len(out) > holes:
        raise Violation(f"exactly once: replica {r} leaves out {len(out)} units, {holes} may be: {out}")


def trains_what_is_due(r: int, trained: Places, due: Places) -> None:
    """Check that what replica `r` has trained of a step is what it is asked for, as far as both go."""
    if trained != due:
        raise Violation(f"other units: replica {r} has trained the places {trained}, it is asked for {due}")


def counts_what_was_brought(r: int, record: CommitRecord, brought: Iterable[tuple[int, Run]]) -> None:
    """Check that the record on which replica `r` votes counts what was brought into the ring, with its weight."""
    known = {(replica, run): weight(run) for replica, run in brought}
    if other := {(c.replica, c.run) for c in record.contributions} - known.keys():
        raise Violation(f"other units: replica {r} counts {sorted(other)}, which are not in the sum")
    if record.divisor != sum(known.values()):
        raise Violation(f"other weights: replica {r} divides by {record.divisor}, the sum has {known}")


def as_many_units_as_wanted(r: int, record: CommitRecord, grant: Grant, policy: UnitPolicy) -> None:
    """Check the number of units of a step that replica `r` commits on `grant`, if the batch is constant.

    Only the first step of an epoch may have fewer, when a contributor was lost in the middle of it, and more, when
    another one came back and the others had trained its units. If replicas have fewer ranks, the number need not
    be one of whole micro-batches: fewer units are missing than one more micro-batch of the widest one has.
    """
    widths = {m.replica: max(1, len(m.ring)) for m in grant.members if m.replica in record.contributors}
    slack = max(widths.values()) - 1 if min(widths.values()) < policy.data_ranks else 0
    cap = sum(widths.values()) * policy.max_accumulate
    if policy.batch != "constant" or record.poisoned or cap < grant.units:
        return
    first = record.step == grant.base.step + 1
    if record.units < grant.units - slack and not (first and policy.refill == "next_step"):
        raise Violation(
            f"too few units: replica {r} commits {record.units} of {grant.units} in step {record.step}"
        )
    if record.units > max(grant.units, sum(widths.values())) and not first:
        raise Violation(f"too many units: replica {r} commits {record.units}, {grant.units} are wanted")


def cut_alike(entries: Mapping[int, tuple[int, tuple[int, ...]]]) -> None:
    """Check that the members of a ring that holds a sum have cut their gradients into the same lanes.

    Args:
        entries: for each member, how many ranks it has, and the widths of all members by its grant.
    """
    plans = {replica: lanes(TENSORS, told or (width,)) for replica, (width, told) in entries.items()}
    if len(set(plans.values())) > 1:
        raise Violation(f"other widths: the members of a ring cut their gradients for {dict(entries)}")
    for replica, (width, _) in entries.items():
        if {rank for lane in plans[replica] if width in lane.widths for rank in [lane.owner(width)]} != {
            *range(width)
        }:
            raise Violation(f"other widths: replica {replica} has {width} ranks, the ring knows {dict(entries)}")


def names_widths(r: int, record: CommitRecord, widths: Mapping[int, int], ranks: int) -> None:
    """Check that a record which replica `r` commits names the widths that its voters had.

    Each rank of a contributor trains as many units, so that none waits for another.

    Args:
        r: place of the replica.
        record: the record.
        widths: ranks of each member that voted.
        ranks: of a replica that has all.
    """
    ring = tuple(widths[replica] for replica in record.ring)
    if record.ring_widths != (ring if len(set(ring)) > 1 else ()):
        raise Violation(f"other widths: replica {r} commits with {record.ring_widths}, the voters had {ring}")
    for replica in record.contributors:
        width, mine = widths[replica], [c for c in record.contributions if c.replica == replica]
        if {c.width for c in mine} != {width if width < ranks else 0}:
            raise Violation(f"other widths: replica {r} commits {mine} of a replica with {width} ranks")
        if sum(c.units for c in mine) % width:
            raise Violation(f"idle ranks: replica {r} commits {mine} of a replica with {width} ranks")


def no_longer_than_needed(grant: Grant, policy: UnitPolicy) -> None:
    """Check that no contributor waits for another one because that has fewer ranks.

    Micro-batches are trained one after the other: no rank has more of them than all ranks together need for the
    wanted units, and with a batch that adapts no more than those of a replica that has all its ranks.
    """
    widths = {m.replica: len(m.ring) for m in grant.members if m.role == "contribute"}
    rounds = {m.replica: -(-m.units // len(m.ring)) for m in grant.members if m.role == "contribute"}
    most = -(-grant.units // max(1, sum(widths.values()))) if policy.batch == "constant" else policy.accumulate
    if slow := {r: n for r, n in rounds.items() if n > max(1, most)}:
        raise Violation(f"waits: epoch {grant.epoch} wants {slow} micro-batches of ranks, {most} are enough")


def whole_ones_take_over(grant: Grant, policy: UnitPolicy) -> None:
    """Check that no contributor trains further units of a constant batch that fill a wider one's micro-batch."""
    if policy.batch != "constant":
        return
    able = [(len(m.ring), m.units // len(m.ring)) for m in grant.members if m.role == "contribute"]
    least, missing = min((n for _, n in able), default=0), grant.units - sum(width * n for width, n in able)
    for width, rounds in able:
        taken = sum(other for other, n in able if other < width and n > least)
        if rounds == least and taken and missing + taken >= width:
            raise Violation(f"takes over: of {able} one of {width} ranks could train what fewer ranks train")


def repeats_nothing(r: int, trained: Places) -> None:
    """Check that replica `r`, which leaves to come back with more ranks, throws nothing away that it trained."""
    if trained:
        raise Violation(
            f"repeated: replica {r} leaves to grow, and drops the places {trained}, which it has trained"
        )


def agreement(r: int, state: StateId, contents: Sequence[Content], replicas: Sequence[Replica | None]) -> None:
    """Check that all replicas which name their state as replica `r` names its own have the same content."""
    mine = contents[r]
    for other, (peer, content) in enumerate(zip(replicas, contents, strict=True)):
        if peer is None or other == r or not state_id.same(peer.state, state):
            continue
        if content != mine and peer.state.step == len(content):
            raise Violation(
                f"agreement: replicas {r} and {other} both call their state {state}, but one holds "
                f"{_batches(mine)}, the other {_batches(content)}"
            )


def nothing_lost(record: CommitRecord, content: Content, lost: Content, epoch: int) -> None:
    """Check that a commit builds on `lost`, which a member of its epoch had committed in `epoch`."""
    if content[: len(lost)] != lost:
        raise Violation(
            f"lost commit: epoch {record.epoch} commits step {record.step} without step {len(lost)} of "
            f"epoch {epoch}, which a member of it had committed"
        )


def one_history(r: int, contents: Sequence[Content], replicas: Sequence[Replica | None]) -> None:
    """Check that what replica `r` has just committed and what each living replica has applied are one history."""
    mine = contents[r]
    for other, (peer, content) in enumerate(zip(replicas, contents, strict=True)):
        common = min(len(mine), len(content))
        if peer is not None and mine[:common] != content[:common]:
            raise Violation(
                f"two histories: replica {r} commits {_batches(mine)}, while replica {other} lives and has "
                f"committed {_batches(content)}"
            )


def leaves_in_sight(r: int, replicas: Sequence[Replica | None]) -> None:
    """Check that each replica that leaves with the commit of `r` said so before, so that none waits for it."""
    me = replicas[r]
    ring = [p for p in replicas if me and p and p.intact and p.grant == me.grant and p.ring_state == me.ring_state]
    for gone in ring:
        unaware = [p.me for p in ring if gone.phase is Phase.LEAVING and gone.me not in p.leaving]
        if unaware:
            raise Violation(
                f"unsaid: replica {gone.me} leaves after {gone.ring_state}, replicas {unaware} do not know"
            )


def one_future(r: int, content: Content, other: int, kept: Iterable[Content]) -> None:
    """Check that what replica `r` has just committed and what `other` may come back with are one history."""
    for found in kept:
        common = min(len(content), len(found))
        if content[:common] != found[:common]:
            raise Violation(
                f"two histories: replica {r} commits {_batches(content)}, while replica {other} may come back "
                f"with {_batches(found)}"
            )


def on_sound_states(r: int, record: CommitRecord, flips: Iterable[Flip]) -> None:
    """Check that nothing that builds on a corrupt state is committed. A ring of one cannot find out."""
    for flip in flips:
        if flip.replica in {r, *record.contributors} and record.step > flip.step and len(record.ring) > 1:
            raise Violation(f"corrupt: replica {r} commits step {record.step} on the corrupt {flip.replica}")


def enough(r: int, record: CommitRecord, min_replicas: int) -> None:
    """Check that replica `r` commits nothing to which fewer than `min_replicas` have contributed."""
    if len(record.contributors) < min_replicas:
        raise Violation(f"too few: replica {r} commits step {record.step} of replicas {list(record.contributors)}")


def waits_for_something(r: int, me: Replica, asks: bool) -> None:
    """Check that a living replica has an open request, an answer on its way, a fetch or a ring, or has ended.

    Each of these ends by itself: requests are repeated, fetches have a deadline, and a ring sees its own failure.

    Args:
        r: place of the replica.
        me: its core.
        asks: there is an open request of it, or an answer to it is on its way.
    """
    ring = me.intact and me.phase in (Phase.REDUCING, Phase.VOTED, Phase.LEAVING)
    if not (me.phase is Phase.DONE or asks or ring or me.fetching is not None or me.writing is not None):
        raise Violation(f"idle: replica {r} has no open request and no timer: it waits for nothing")


def no_storm(epoch: int, head: StateId | None) -> None:
    """Check that epochs do not follow each other for ever without a step."""
    if epoch - (head.commit_epoch if head is not None else 0) > EPOCHS_WITHOUT_A_STEP:
        raise Violation(f"storm: {EPOCHS_WITHOUT_A_STEP} epochs in a row, and none of them makes a step")


def accuses_no_living(r: int, other: int) -> NoReturn:
    """Fail: replica `other` waits in a ring for replica `r`, which lives but does not come, and would end it."""
    raise Violation(f"accused: replica {r} waits for the lighthouse, but replica {other} takes it to hang")


def head_stays(before: StateId | None, after: StateId | None, audited: bool) -> None:
    """Check that the lighthouse's head never goes back, unless the lighthouse says so."""
    if before is not None and after is not None and state_id.newer(before, after) and not audited:
        raise Violation(f"the head went back from {before} to {after} silently")


def truly_lost(head: StateId | None, replicas: Sequence[Replica | None], kept: Sequence[tuple[Kept, ...]]) -> None:
    """Check that the lighthouse gives the head up only if no replica holds it or can come back with it."""
    for r, peer in enumerate(replicas):
        if peer is None and any(head == snapshot.state for snapshot in kept[r]):
            raise Violation(f"given up: replica {r} may come back with the head {head}")
        if peer is not None and head is not None and state_id.same(peer.state, head):
            raise Violation(f"given up: replica {r} lives and holds the head {head}")


def younger_counts(
    younger: tuple[int, str], before: Grant | None, after: Grant | None, answers: Iterable[Answer]
) -> None:
    """Check that of two lives of one replica the one that was admitted later counts.

    No new grant names the older one, and `younger`, which gets `answers` now, is not sent away because of it.
    """
    if after is not None and after is not before and after != before:
        older = [m for m in after.members if m.replica == younger[0] and m.incarnation != younger[1]]
        if any(not same_run((m.replica, m.incarnation), younger) for m in older):
            raise Violation(
                f"identity: epoch {after.epoch} names {older[0].incarnation}, which is older than {younger[1]}"
            )
    for answer in answers:
        if isinstance(answer, Refused) and "fenced" in answer.reason:
            raise Violation(f"identity: {younger[1]} is sent away because of an older life: {answer.reason}")


def ended_together(
    contents: Sequence[Content], replicas: Sequence[Replica | None], late: Container[int], steps: int
) -> bool:
    """Return whether all replicas ended at one final state, but for those that came back later (`late`)."""
    ends = {
        (me.state, content) if me is not None and me.phase is Phase.DONE else None
        for r, (me, content) in enumerate(zip(replicas, contents, strict=True))
        if r not in late
    }
    return len(ends) <= 1 and all(end is not None and end[0].step == len(end[1]) == steps for end in ends)


def _batches(content: Content) -> str:
    return " | ".join(" ".join(f"{s}:{i}" for s, i, _ in sorted(step)) for step in content) or "nothing"

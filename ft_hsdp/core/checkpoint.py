"""Which replica writes the durable checkpoint of a step, and which one writes another if that replica is lost.

All replicas that hold a state hold the same bits, so one of them writes it (FT-HSDP §5). The rules depend only on
what the commit token gathered, so all members that heard the token decide alike. A member that has not heard it
decides nothing; a demand for a checkpoint then reaches it with the next token.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ft_hsdp.core.commit import CommitToken
from ft_hsdp.core.effects import WriteCheckpoint
from ft_hsdp.core.grant import Grant, Member
from ft_hsdp.core.replica_state import Phase, Replica, Step
from ft_hsdp.core.state_id import StateId


def due(step: int, every: int, last: int) -> bool:
    """Return whether a durable checkpoint of the state after `step` is due.

    Args:
        step: committed steps of the state.
        every: steps between two checkpoints; 0: there are none.
        last: steps of the job; the state after the last one is always due.

    Returns:
        False whenever `every` is 0.
    """
    return bool(every) and (step % every == 0 or step == last)


def newest_due(step: int, every: int, last: int) -> int:
    """Return the newest step up to `step` whose state was due.

    Args:
        step: committed steps of a state.
        every: steps between two checkpoints; 0: there are none.
        last: steps of the job.

    Returns:
        A step; 0 if none was due.
    """
    if step >= last:
        return last if every else 0
    return step - step % every if every else 0


def designated(equal: Collection[int], unwritable: Collection[int]) -> int | None:
    """Return the replica that writes: the lowest of `equal` that can.

    Args:
        equal: ids of the replicas that hold the state.
        unwritable: ids of those that could not write their last checkpoint. If all of `equal` are among them, the
            lowest one tries again.

    Returns:
        A replica id; None if no replica holds the state.
    """
    return min([r for r in equal if r not in unwritable] or equal, default=None)


def successor(equal: Collection[int], known: Collection[int], unwritable: Collection[int]) -> int | None:
    """Return the replica that writes at once, whatever the step, because a failure to write is news.

    Args:
        equal: ids of the replicas that hold the state.
        known: ids of those whose failure all members had heard of before.
        unwritable: ids of those that could not write their last checkpoint.

    Returns:
        The lowest id of `equal` that can write. None if there is no new failure, or no replica that can write.
    """
    if not set(unwritable) - set(known):
        return None
    return min((r for r in equal if r not in unwritable), default=None)


# Attempts in place of one that was lost or failed everywhere; then the next one that is due counts.
MAX_RETRIES = 3


def write(
    s: Replica,
    state: StateId,
    holders: Collection[Member],
    unwritable: tuple[int, ...] | None = None,
    demanded: bool = False,
) -> Step:
    """Have `state` written by one of its `holders` if that is due, demanded, or needed in place of a failed one.

    Args:
        s: the replica that decides.
        state: what the holders hold now.
        holders: the members that may write it.
        unwritable: replicas that could not write their last checkpoint, by the newest token; None: no token was
            heard.
        demanded: whether it is written although none is due.

    Returns:
        The replica, which knows the writer, and `WriteCheckpoint` if it is the writer itself.
    """
    heard = s.unwritable if unwritable is None else unwritable
    able = {m.replica: m.incarnation for m in holders}
    is_due = due(state.step, s.policy.checkpoint_every, s.steps)
    writer = designated(able, heard) if is_due or demanded else None
    if writer is None:
        writer = successor(able, s.unwritable, heard)
    if writer is None:
        return s, ()
    writers = tuple(sorted({*s.writers, (writer, able[writer])}))
    s = replace(
        s, writers=writers, checkpoint_missing=True, checkpoint_retries=0 if is_due else s.checkpoint_retries
    )
    return (s, ()) if writer != s.me else (replace(s, writing=state), (WriteCheckpoint(state),))


def token_decided(s: Replica, token: CommitToken) -> Replica:
    """Note what the verdict's token says of the writers.

    A writer that is no longer among the token's `writing`, nor among its `unwritable`, made its checkpoint
    durable.

    Args:
        s: the replica.
        token: with the verdict.

    Returns:
        The replica, whose writers are those that the token names.
    """
    assert s.grant is not None
    ended = {replica for replica, _ in s.writers}.difference(token.writing)
    done = bool(ended.difference(token.unwritable))
    writers = tuple(sorted((m.replica, m.incarnation) for m in s.grant.members if m.replica in token.writing))
    return replace(
        s,
        writers=writers,
        checkpoint_missing=s.checkpoint_missing and not done,
        checkpoint_retries=0 if done else s.checkpoint_retries,
    )


def grant_adopted(s: Replica, grant: Grant) -> Replica:
    """Count a writer that is no member of `grant` as lost.

    Then the state of the next step is to be written instead.

    Args:
        s: the replica.
        grant: the one that it adopts.

    Returns:
        The replica, with a demand for that checkpoint if all writers are lost.
    """
    left = tuple(writer for writer in s.writers if grant.member(*writer) is not None)
    lost = left != s.writers and not left
    s = replace(s, writers=left)
    return _request_next(s, grant.base.step + 1) if lost else s


def writer_lost(s: Replica, suspect: int | None) -> Step:
    """Let another replica write the final state if `suspect` was writing it when the ring broke.

    Args:
        s: the replica, in phase FINAL.
        suspect: the replica with which the ring broke, if it is known.

    Returns:
        The replica, and `WriteCheckpoint` if it is the new writer.
    """
    left = tuple(writer for writer in s.writers if writer[0] != suspect)
    if left == s.writers or left or s.checkpoint_retries >= MAX_RETRIES or s.grant is None:
        return s, ()
    able = [m for m in s.grant.members if m.replica in s.up_to_date and m.replica != suspect]
    return write(
        replace(s, writers=left, checkpoint_retries=s.checkpoint_retries + 1), s.state, able, demanded=True
    )


def own_write_ended(s: Replica, state: StateId, written: bool) -> Replica:
    """Note that this replica's own attempt to write `state` has ended.

    Args:
        s: the replica.
        state: that was to be written.
        written: whether all ranks wrote their shards.

    Returns:
        The replica, which is no writer of `state` any more.
    """
    mine = state == s.writing
    others = tuple(w for w in s.writers if w[0] != s.me) if mine else s.writers
    s = replace(s, checkpoint_failed=not written, writing=None if mine else s.writing, writers=others)
    return replace(s, checkpoint_missing=False, checkpoint_retries=0) if written else s


def retry_overdue(s: Replica) -> Step:
    """Try again: since this replica could not write a checkpoint, no other has written one in time.

    Args:
        s: the replica.

    Returns:
        The replica, and `WriteCheckpoint` if it writes the final state itself.
    """
    ordered = bool(s.writers) or s.requested_checkpoint > s.saved
    if ordered or not s.checkpoint_missing or not s.checkpoint_failed or s.checkpoint_retries >= MAX_RETRIES:
        return s, ()
    if s.phase is not Phase.FINAL or not s.verified:
        return _request_next(s, s.ring_state.step + 1), ()
    return write(
        replace(s, checkpoint_retries=s.checkpoint_retries + 1),
        s.state,
        [Member(s.me, s.incarnation, "contribute")],
        demanded=True,
    )


def _request_next(s: Replica, step: int) -> Replica:
    """Demand a checkpoint of a state of `step` or more steps, unless `MAX_RETRIES` attempts were made already."""
    return (
        s
        if s.checkpoint_retries >= MAX_RETRIES
        else replace(
            s, checkpoint_retries=s.checkpoint_retries + 1, requested_checkpoint=max(s.requested_checkpoint, step)
        )
    )

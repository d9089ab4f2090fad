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
    """Return whether a checkpoint after `step` is due: each `every` steps (0: never), and after the `last`."""
    return bool(every) and (step % every == 0 or step == last)


def newest_due(step: int, every: int, last: int) -> int:
    """Return the newest step up to `step` whose state was `due`, by `every` and `last`; 0 if none was."""
    if step >= last:
        return last if every else 0
    return step - step % every if every else 0


def designated(equal: Collection[int], unwritable: Collection[int]) -> int | None:
    """Return the replica that writes: the lowest of `equal`, which hold the state; None if there is none.

    Those in `unwritable` could not write their last checkpoint. They are passed over, unless all of `equal` are
    among them.
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
    """Return the replica with the writers that the verdict's `token` names.

    A writer that is no longer among the token's `writing`, nor among its `unwritable`, made its checkpoint
    durable.
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
    """Return the replica, which counts a writer that is no member of `grant` as lost.

    If all are, it demands that the state of the next step is written instead.
    """
    left = tuple(writer for writer in s.writers if grant.member(*writer) is not None)
    lost = left != s.writers and not left
    s = replace(s, writers=left)
    return _request_next(s, grant.base.step + 1) if lost else s


def writer_lost(s: Replica, suspect: int | None) -> Step:
    """Let another replica write the final state if `suspect` (None: unknown) was writing it when the ring broke.

    Returns `WriteCheckpoint` if this replica is the new writer.
    """
    left = tuple(writer for writer in s.writers if writer[0] != suspect)
    if left == s.writers or left or s.checkpoint_retries >= MAX_RETRIES or s.grant is None:
        return s, ()
    able = [m for m in s.grant.members if m.replica in s.up_to_date and m.replica != suspect]
    return write(
        replace(s, writers=left, checkpoint_retries=s.checkpoint_retries + 1), s.state, able, demanded=True
    )


def own_write_ended(s: Replica, state: StateId, written: bool) -> Replica:
    """Return the replica after its attempt to write `state`; `written`: all ranks wrote their shards."""
    mine = state == s.writing
    others = tuple(w for w in s.writers if w[0] != s.me) if mine else s.writers
    s = replace(s, checkpoint_failed=not written, writing=None if mine else s.writing, writers=others)
    return replace(s, checkpoint_missing=False, checkpoint_retries=0) if written else s


def retry_overdue(s: Replica) -> Step:
    """Try again: since this replica could not write a checkpoint, no other has written one in time.

    Returns `WriteCheckpoint` if it writes the final state itself.
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

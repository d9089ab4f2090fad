"""Checkpoint: which replica writes the durable checkpoint of a step. A function of what the commit token gathered.

All that hold a state hold the same bits, so one of them writes it; the others are spared (FT-HSDP §5 has one
replica write for all).

Writing: which replica writes the checkpoint of a state, and who writes another one if that replica is lost.

All of it follows from what the commit token gathered, so all members that heard the token decide alike. Who has
not heard it decides nothing; what the others demand then reaches it with the next token.
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
    """Whether the state after ``step`` is to be written: each ``every`` steps (0: never), and the ``last``."""
    return bool(every) and (step % every == 0 or step == last)


def newest_due(step: int, every: int, last: int) -> int:
    """The newest step up to ``step`` whose state was to be written; 0: none was."""
    if step >= last:
        return last if every else 0
    return step - step % every if every else 0


def designated(equal: Collection[int], unwritable: Collection[int]) -> int | None:
    """The replica that writes: the lowest of ``equal`` that can; None: nobody holds the state.

    If none of them could write the last time, the lowest one tries again.
    """
    return min([r for r in equal if r not in unwritable] or equal, default=None)


def successor(equal: Collection[int], known: Collection[int], unwritable: Collection[int]) -> int | None:
    """The replica that writes at once, whatever the step, because a failure to write was heard for the first time.

    ``known`` are those of whose failure everybody had heard before. None: there is no news, or nobody is left.
    """
    if not set(unwritable) - set(known):
        return None
    return min((r for r in equal if r not in unwritable), default=None)


MAX_AGAIN = 3  # attempts in the place of one that was lost or failed everywhere; then the next one due counts


def write(
    s: Replica,
    state: StateId,
    holders: Collection[Member],
    unwritable: tuple[int, ...] | None = None,
    demanded: bool = False,
) -> Step:
    """Have ``state`` written by one of its ``holders``, and note by whom.

    Args:
        s: the replica that decides.
        state: what the holders hold now.
        holders: the members that may write it.
        unwritable: who could not write its last checkpoint, by the newest token; None: nothing new was heard.
        demanded: whether it is written although none is due.
    """
    heard = s.unwritable if unwritable is None else unwritable
    able = {m.replica: m.incarnation for m in holders}
    is_due = due(state.step, s.rules.checkpoint_every, s.steps)
    writer = designated(able, heard) if is_due or demanded else None
    if writer is None:
        writer = successor(able, s.unwritable, heard)
    if writer is None:
        return s, ()
    writers = tuple(sorted({*s.writers, (writer, able[writer])}))
    s = replace(s, writers=writers, missing=True, again=0 if is_due else s.again)
    return (s, ()) if writer != s.me else (replace(s, writing=state), (WriteCheckpoint(state),))


def heard(s: Replica, token: CommitToken) -> Replica:
    """What the token says of the writers: one that has ended without a failure has made its checkpoint durable."""
    assert s.grant is not None
    ended = {replica for replica, _ in s.writers}.difference(token.writing)
    done = bool(ended.difference(token.unwritable))
    writers = tuple(sorted((m.replica, m.incarnation) for m in s.grant.members if m.replica in token.writing))
    return replace(s, writers=writers, missing=s.missing and not done, again=0 if done else s.again)


def granted(s: Replica, grant: Grant) -> Replica:
    """A writer that is no member of ``grant`` counts as lost: the next step's state is to be written instead."""
    left = tuple(writer for writer in s.writers if grant.member(*writer) is not None)
    lost = left != s.writers and not left
    s = replace(s, writers=left)
    return _demanded(s, grant.base.step + 1) if lost else s


def bereft(s: Replica, suspect: int | None) -> Step:
    """The ring broke after the last step: if ``suspect`` was writing the final state, another one writes it."""
    left = tuple(writer for writer in s.writers if writer[0] != suspect)
    if left == s.writers or left or s.again >= MAX_AGAIN or s.grant is None:
        return s, ()
    able = [m for m in s.grant.members if m.replica in s.equal and m.replica != suspect]
    return write(replace(s, writers=left, again=s.again + 1), s.state, able, demanded=True)


def ended(s: Replica, state: StateId, written: bool) -> Replica:
    """This replica's own attempt at ``state`` is over."""
    mine = state == s.writing
    others = tuple(w for w in s.writers if w[0] != s.me) if mine else s.writers
    s = replace(s, failing=not written, writing=None if mine else s.writing, writers=others)
    return replace(s, missing=False, again=0) if written else s


def overdue(s: Replica) -> Step:
    """Nobody has written a checkpoint for a while after this replica could not: it is to be tried again."""
    ordered = bool(s.writers) or s.wanted > s.saved
    if ordered or not s.missing or not s.failing or s.again >= MAX_AGAIN:
        return s, ()
    if s.phase is not Phase.FINAL or not s.verified:
        return _demanded(s, s.head.step + 1), ()
    return write(
        replace(s, again=s.again + 1), s.state, [Member(s.me, s.incarnation, "contribute")], demanded=True
    )


def _demanded(s: Replica, step: int) -> Replica:
    return s if s.again >= MAX_AGAIN else replace(s, again=s.again + 1, wanted=max(s.wanted, step))

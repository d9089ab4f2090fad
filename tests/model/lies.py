"""One member reports one wrong value: what it may say, and what must hold all the same."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from ft_hsdp.core.commit import CommitRecord, Contribution
from ft_hsdp.core.effects import RequestGrant
from ft_hsdp.core.grant import Report
from ft_hsdp.core.replica_state import Replica
from ft_hsdp.core.state_id import StateId
from ft_hsdp.core.voting import ask
from lighthouse.quorum.state import LighthouseState
from lighthouse.quorum.witnesses import named
from tests.model.invariants import Violation

WRONG = "wrong"  # a lineage that no commit leads to


def _state(r: Report, more: int) -> Report:
    step = r.state.step + more
    return replace(r, state=StateId(max(1, r.epoch) if step else 0, step, WRONG), step=step + 1)


def _record(r: Report) -> CommitRecord:
    """Return a record of the next step that no ring has made, on the state that is reported."""
    mine = (Contribution(r.replica, 1, r.replica, r.state.step),)
    return CommitRecord(max(1, r.epoch), 0, r.state.step + 1, r.state.lineage, (r.replica,), 3, mine, WRONG)


LIES: dict[str, Callable[[Report], Report]] = {
    "lineage": lambda r: _state(r, 0),
    "step": lambda r: _state(r, 1),
    "far": lambda r: _state(r, 3),
    "record": lambda r: replace(r, prepared=_record(r)),
    "forged": lambda r: replace(r, state=_record(r).state_id, step=r.state.step + 2, committed=_record(r)),
    "doubt": lambda r: replace(r, doubt=StateId(max(1, r.epoch), r.state.step + 3, WRONG)),
    "term": lambda r: replace(r, max_term=r.max_term + 9),
    "epoch": lambda r: replace(r, epoch=r.epoch + 9),
    "number": lambda r: replace(r, number=r.number + 9),
    "leaving": lambda r: replace(r, leaving=tuple(n for n in (0, 1, 2) if n != r.replica)),
    "diverged": lambda r: replace(r, diverged=(0, 1)),
}
"""What may be wrong in the report that a member would send now, by the name in `Bounds.lie`."""


def told(me: Replica, lie: str, asked: Report | None) -> tuple[Report, tuple[StateId, ...]]:
    """Return what `me` has `asked`, or would report now, with one wrong value; and the false states in that."""
    true = asked or next(e.report for e in ask(me)[1] if isinstance(e, RequestGrant))
    false = LIES[lie](true)
    return false, tuple(state for state in named(false) if state not in named(true))


def is_harmless(s: LighthouseState, false: Sequence[StateId], halted: bool) -> None:
    """Check that no false state is the head or a base, and that the job goes on."""
    base = None if s.grant is None else s.grant.base
    if s.head in false or base in false:
        raise Violation(f"false head: head {s.head}, epoch {s.epoch} on {base}, after one wrong report")
    if halted:
        raise Violation(f"halted: one wrong report ends the job: {s.halted}")


def takes_no_other(r: int, liar: int, why: str) -> None:
    """Check that a wrong report of replica `liar` does not end replica `r`."""
    if r != liar:
        raise Violation(f"lost: replica {r} ends because of what replica {liar} reported: {why}")

"""Decisions: what the core of a replica has decided, in words, in its journal."""

from __future__ import annotations

from ft_hsdp.core import divergence, effects, events
from ft_hsdp.core.commit import Fence
from ft_hsdp.core.standing import Phase, Replica
from ft_hsdp.events import Journal


class Decisions:
    """One replica's. ``torn`` is the newest epoch whose ring failed, that is, was not left for a newer one."""

    def __init__(self, journal: Journal) -> None:
        self.torn = 0
        self._journal = journal
        self._away = False  # whether the replica was left behind, and has not contributed since

    def note(self, before: Replica, event: events.Event, after: Replica, due: tuple[effects.Effect, ...]) -> None:
        """``event`` has led from ``before`` to ``after``, and to what is ``due``."""
        wrong = after.suspects or after.diverged
        if wrong and wrong != (before.suspects or before.diverged):
            step = after.head.step
            facts = {"replicas": list(wrong), "step": step, "slice": divergence.number(step)}
            self._journal.event("StateDiverged", _differing(event, after), majority=bool(after.suspects), **facts)
        lost = sorted(r for r, _ in set(before.writers) - set(after.writers))
        if lost and (before.grant != after.grant or isinstance(event, events.RingBroken)):
            self._journal.event("CheckpointWriterLost", _instead(lost, after), replicas=lost)
        for effect in due:
            match effect:
                case effects.Configure(grant):
                    facts = {"epoch": grant.epoch, "step": after.fence.step, "members": list(grant.ring)}
                    self._journal.event("GrantAdopted", grant.reason, role=after.role, **facts)
                case effects.Commit(record) if self._away and after.me in record.contributors:
                    self._away = False
                    self._journal.event("Rejoined", "contributes again", **_fence(record.fence))
                case effects.Discard(reason):
                    self._away = True
                    self._journal.event("LeftBehind", reason, step=before.fence.step)
                case effects.Reduce(fence) if _again(before, fence, self.torn):
                    reason = "the same gradient is reduced again on another ring"
                    self._journal.event("StepRetried", reason, **_fence(fence))
                case effects.Commit(record) if record.skipped:
                    reason = f"gradient of replicas {list(record.poisoned)} is not finite: no weight changes"
                    self._journal.event(
                        "StepSkipped", reason, replicas=list(record.poisoned), **_fence(record.fence)
                    )
                case effects.Checkpoint(state):
                    reason = "this replica writes it for all"
                    self._journal.event("CheckpointStarted", reason, step=state.step)
                case effects.Commit(record) if isinstance(event, events.Answered | events.GrantShown):
                    reason = "the lighthouse has everybody build on the record that was in doubt"
                    self._journal.event("DoubtResolved", reason, **_fence(record.fence))
                case effects.StopRing(_, reason) if reason.startswith("stale"):
                    self._journal.event("GrantRefused", reason, state=str(before.state))
                case effects.Exit(code, reason):
                    final = after.state.step >= after.steps
                    name = ("Finished" if final else "Left") if code == 0 else "Ended"
                    self._journal.event(name, reason, code=code)


def _again(before: Replica, fence: Fence, torn: int) -> bool:
    """Whether this reduction repeats a step that had begun, or whose ring, of epoch ``torn``, failed before."""
    begun = before.phase is not Phase.ASKING or before.void is not None or before.forwarded
    failed = not before.intact and before.fence.epoch == torn
    again = before.grant is not None and before.fence.step == fence.step and before.fence != fence
    return again and (begun or failed)


def _instead(lost: list[int], after: Replica) -> str:
    """What follows from the loss of the writers of checkpoints, in words."""
    who = f"replicas {lost} were lost while they wrote a checkpoint"
    if after.writers:
        return f"{who}: replicas {[r for r, _ in after.writers]} write a newer one"
    if after.wanted > after.saved:
        return f"{who}: the state of the next step is written instead"
    return f"{who}, and so often before: the next one that is due counts"


def _differing(event: events.Event, after: Replica) -> str:
    """Who differs from whom, in words."""
    token = event.token if isinstance(event, events.TokenArrived) else None
    return divergence.describe(token.digests, after.head) if token is not None else ""


def _fence(fence: Fence) -> dict[str, int]:
    return {"epoch": fence.epoch, "step": fence.step, "attempt": fence.attempt}

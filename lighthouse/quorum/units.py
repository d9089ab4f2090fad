"""How the units of a step are shared out among the members of a grant: who contributes, how much, and what first.

`apportion` is the rule. It knows places only (`ft_hsdp.core.units`), never data.
"""

from __future__ import annotations

from dataclasses import replace

from ft_hsdp.core import state_id
from ft_hsdp.core.grant import Grant, Member
from ft_hsdp.core.state_id import StateId
from ft_hsdp.core.units import UnitPolicy, redeal


def apportion(grant: Grant, before: Grant | None, policy: UnitPolicy, refill: bool) -> Grant:
    """Return ``grant`` with the units and the first places of its members.

    Members that hold the base contribute, as many as the policy allows; the rest of them stand by. Those that
    contributed before go on, so that they change places as rarely as possible.

    Args:
        grant: The new membership, in which each member that holds the base contributes.
        before: The membership before; None if there was none.
        policy: How units are shared out; the operator's number of replicas gives way to `Grant.total`.
        refill: Whether members that stay take more units in the first step already, if they are to take more.
    """
    policy = replace(policy, replicas=grant.total)
    dealt = _places_before(before, grant.base)
    able = [m for m in grant.members if m.role == "contribute"]
    count = policy.contributors(len(able))
    contributed = {m.replica for m in before.members if m.role == "contribute"} if before else set()
    chosen = {m.replica for m in sorted(able, key=lambda m: m.replica not in contributed)[:count]}
    widths = [_data_ranks(m, policy) for m in grant.members if m.replica in chosen]
    shares = iter(policy.shares(widths))
    full = max((_data_ranks(m, policy) for m in grant.members), default=1)
    members = []
    for m in grant.members:
        if m.role != "contribute":  # it is behind: what it will train once it contributes
            members.append(replace(m, units=policy.shares([*widths, _data_ranks(m, policy)])[-1], places=()))
        elif m.replica in chosen:
            members.append(replace(m, units=next(shares), places=()))
        else:
            members.append(replace(m, role="standby", units=0, places=()))
    shared_out = replace(
        grant,
        members=tuple(members),
        units=policy.replicas * policy.accumulate * (policy.data_ranks or full),
        shared=policy.shared,
        dealt=0,
    )
    return _keep_places(shared_out, before, dealt, refill)


def _places_before(before: Grant | None, base: StateId) -> dict[int, tuple[tuple[int, int], ...]]:
    """Return which places each member of ``before`` may have begun with on ``base``, by replica id."""
    if before is None or not (state_id.same(before.base, base) or before.epoch == base.commit_epoch):
        return {}
    return before.places(base.step + 1)


def _keep_places(
    grant: Grant, before: Grant | None, dealt: dict[int, tuple[tuple[int, int], ...]], refill: bool
) -> Grant:
    """Return ``grant`` with places for its first step, where they are others than those of an undisturbed step."""
    counts = {m.replica: m.units for m in grant.members if m.role == "contribute"}
    known = {m.replica for m in before.members if m.role == "contribute"} if before else set()
    # One that has another number of ranks now has begun no batch: what it had is free, as that of a lost one.
    width = {m.replica: len(m.ring) for m in grant.members}
    other = {m.replica for m in before.members if width.get(m.replica, 0) != len(m.ring)} if before else set()
    kept = {~r if r in other else r: places for r, places in dealt.items() if r in known or r in counts}
    if not kept:
        return grant
    used = before.dealt if before is not None and state_id.same(before.base, grant.base) else 0
    places, end = redeal(kept, counts, grant.shared, refill, used)
    usual = grant.places(grant.base.step + 1)
    changed = {r: mine for r, mine in places.items() if mine != usual[r]}
    members = (replace(m, places=changed.get(m.replica, ())) for m in grant.members)
    return replace(grant, members=tuple(members), dealt=end)


def _data_ranks(member: Member, policy: UnitPolicy) -> int:
    """Return how many units a member trains at once."""
    return max(1, len(member.ring) // policy.ranks_per_unit)

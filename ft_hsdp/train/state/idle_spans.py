"""When this rank's network is idle, told to the state agent while copies of its replica's shards are made.

Three parts of a rank communicate: FSDP2 inside the replica, forward and backward (`fsdp.param_groups.watch`);
FTAR's ring between replicas, from the first bucket to the last one (`gradients.Reducer`); and the control loop,
whose messages are too small to count. `SpanWatch` has the first two tell a `SpanMeter`, and opens the rank's gate
at the agent, as long as the hosts of its replica owe copies. Otherwise nothing is watched, and there is no gate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ft_hsdp.jsonl import Journal
from ft_hsdp.memory.schedule import Profile
from ft_hsdp.state.pacing import MAX_SPANS, PROFILED, SpanMeter
from ft_hsdp.train.state.snapshots import SnapshotWriter


@dataclass(eq=False)
class SpanWatch:
    """Watches the communication of one rank while it is wanted."""

    # Has a meter told of each communication inside the replica; with None no meter any more.
    _watch: Callable[[SpanMeter | None], None]
    _agent: SnapshotWriter
    _journal: Journal
    _wanted: bool = False
    _planned: bool | None = None  # as it was told last

    def __post_init__(self) -> None:
        self.meter = SpanMeter(self._found)

    def want(self, wanted: bool) -> None:
        """Watch from now on, or do not. On the control loop; does not block."""
        if wanted == self._wanted:
            return
        self._wanted = wanted
        if wanted:
            self._watch(self.meter)
            self._agent.open_gate(self.meter.attach)
        else:
            self._watch(None)
            self.meter.detach()
            self._planned = None
            self._agent.close_gate()

    def step(self, step: int) -> None:
        """Note that the live state is that of ``step``. On the main thread."""
        if self._wanted:
            self.meter.step(step)

    def _found(self, profile: Profile, planned: bool) -> None:
        """Tell how copies leave when that has changed. On the main thread."""
        if planned == self._planned:
            return
        self._planned = planned
        idle_s = sum(profile.spans)
        deviation = f"{100 * profile.deviation:.0f} %" if profile.spans else "not known"
        if planned:
            why = f"{len(profile.spans)} idle spans of {PROFILED} steps are steady ({deviation} deviation)"
        elif profile.steady:
            why = f"a step has {len(profile.spans)} idle spans, more than the {MAX_SPANS} of the largest plan"
        else:
            why = f"the idle spans of {PROFILED} steps are not steady ({deviation} deviation)"
        self._journal.event("CopiesPaced", why, planned=planned, spans=len(profile.spans), idle_s=round(idle_s, 6))

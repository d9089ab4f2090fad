"""A ring in virtual time: deaths at every round, lost and silent edges, stalls, any order of events."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ft_hsdp.core.ring import ProcessChunk, RingPlan
from ft_hsdp.errors import FTARError, PeerDead, PeerTimeout, RemoteAbort, Skipped
from ft_hsdp.ftar.allreduce import AllReduceOrder
from ft_hsdp.ftar.dataplane.base import Plane, Processed
from ft_hsdp.ftar.dataplane.cpu import CpuJob, CpuPlane
from ft_hsdp.ftar.executor import Work
from ft_hsdp.ftar.pieces import Values
from ft_hsdp.ftar.transport.base import Chunk
from tests.support.ftar.ring_values import KEY, entry, folded, same, values
from tests.support.ftar.sim_ring import Clock, Nature, Sizes, World

CONTROL_S = 1e-4  # less than any delay of data: what the control connection says comes first
ITEM = 4


def delays(chance: random.Random) -> Callable[[], float]:
    return lambda: chance.uniform(1e-3, 2e-2)


class SlowJob(CpuJob):
    """Takes ``depth`` chunks at once and is done with each a while later, in order."""

    def __init__(self, slow: SlowPlane, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.depth = slow.depth
        self._slow = slow
        self._ready: list[Processed] = []
        self._last = 0.0

    def post(self, process: ProcessChunk, arrival: Chunk | None) -> None:
        super().post(process, arrival)
        (item,) = super().completed()
        clock = self._slow.clock
        self._last = max(self._last, clock.now + self._slow.delay())
        clock.at(self._last, partial(self._complete, item))

    def _complete(self, item: Processed) -> None:
        self._ready.append(item)
        self._slow.wake()

    def completed(self) -> list[Processed]:
        done, self._ready = self._ready, []
        return done


class SlowPlane(CpuPlane):
    """A plane that works beside the engine, as a GPU does."""

    clock: Clock
    wake: Callable[[], None]

    def __init__(self, depth: int, delay: Callable[[], float]) -> None:
        super().__init__()
        self.depth, self.delay = depth, delay

    def open(
        self, local: Values | None, out: Values, plan: RingPlan, after: object = None, wire: object = None
    ) -> CpuJob:
        return SlowJob(self, local, out, plan, [], plan.chunk * ITEM)


@dataclass
class Outcome:
    """What became of one work: its sum as it was when the work was over, or the error."""

    sum: Tensor | None = None
    error: BaseException | None = None


class Scene:
    """A ring of ``n``, with a number of works queued at each member; some only relay.

    When a work is over its memory is the caller's again: it is filled with NaN at once, whoever still reads it.
    """

    def __init__(
        self,
        n: int,
        elements: int = 23,
        chunk: int = 2,
        nature: Nature | None = None,
        works: int = 1,
        relays: Sequence[int] = (),
        seed: int = 0,
        depth: int = 0,
    ) -> None:
        chance = random.Random(seed)
        self.nature = nature or Nature(slots=2, delay=delays(chance))
        self.names = [10 + (3 * i) % n if n % 3 else 10 + i for i in range(n)]
        self.plan = RingPlan(elements, n, chunk, self.nature.slots)
        planes: list[Plane] = [SlowPlane(depth, delays(chance)) if depth else CpuPlane() for _ in range(n)]
        self.world = World(self.names, self.nature, planes, self._sizes(), lambda: CONTROL_S)
        for plane, actor in zip(planes, self.world.actors, strict=True):
            if isinstance(plane, SlowPlane):
                plane.clock, plane.wake = self.world.clock, actor.progress
        given_ = [values(n, elements, seed=seed + k) for k in range(works)]
        self.locals = [[None if i in relays else x for i, x in enumerate(row)] for row in given_]
        self.expected = [folded(self.plan, self.names, row, torch.float32) for row in self.locals]
        self.outcomes: list[list[Outcome]] = [[] for _ in range(n)]
        self.works: list[list[Work]] = [[] for _ in range(n)]

    def _sizes(self) -> Sizes:
        return lambda elements, itemsize: self.plan

    def start(self, position: int) -> None:
        actor, name = self.world.actors[position], self.names[position]
        for k, row in enumerate(self.locals):
            local = row[position].clone() if row[position] is not None else None
            out = torch.full((self.plan.elements,), float("nan"))
            order = _order(k, local, out, name)
            work = actor.all_reduce(order)
            self.works[position].append(work)
            work.add_done_callback(partial(self._over, position, local, out))

    def _over(self, position: int, local: Tensor | None, out: Tensor, work: Work) -> None:
        error = work.exception()
        self.outcomes[position].append(Outcome(None if error else out.clone(), error))
        for tensor in (local, out):
            if tensor is not None:
                tensor.fill_(float("nan"))

    def run(self) -> None:
        """All begin, each a little later than the one before; then whatever happens."""
        for i in range(len(self.names)):
            self.world.clock.at(i * 1e-3, partial(self.start, i))
        self.world.run()

    def check(self) -> None:
        """Nothing sums wrong, nothing is more on its way than the slots allow."""
        for outcomes in self.outcomes:
            for got, expected in zip(outcomes, self.expected, strict=False):
                assert got.sum is None or same(got.sum, expected)
        for edge in self.world.edges:
            assert edge.sender.high_water <= self.plan.chunk * ITEM * self.nature.slots

    def survivors(self) -> list[int]:
        return [i for i, a in enumerate(self.world.actors) if not a.dead and not a.stalled]

    def check_ended(self, allowed: tuple[type[FTARError], ...], suspects: set[int]) -> None:
        """Every survivor's works are over: well, or with an error that names whom it should, or skipped."""
        self.check()
        for i in self.survivors():
            assert len(self.outcomes[i]) == len(self.locals), f"a work of member {i} never ends"
            failed = False
            for outcome in self.outcomes[i]:
                if outcome.error is None:
                    assert not failed, "a work behind a failed one went well"
                    continue
                assert isinstance(outcome.error, Skipped if failed else (*allowed, Skipped))
                assert getattr(outcome.error, "suspect", None) in suspects
                failed = True


def _order(step: int, local: Tensor | None, out: Tensor, name: int) -> AllReduceOrder:
    return AllReduceOrder(replace(KEY, step=step), local, out, entry(name, 0 if local is None else 1))


@pytest.mark.parametrize("by_reference", [False, True], ids=["copies", "references"])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_death_at_every_round_of_every_member(n: int, by_reference: bool) -> None:
    """Two works are queued; the victim dies before it takes its k-th chunk, for every k."""
    elements, chunk = 5 * n + 2, 2
    frames = RingPlan(elements, n, chunk, 2).rounds * (2 * n - 2)
    assert frames >= 3 * (2 * n - 2)
    ended = set()
    for victim in range(n):
        for k in range(2 * frames):
            chance = random.Random(k)
            nature = Nature(2, delays(chance), by_reference=by_reference)
            scene = Scene(n, elements, chunk, nature, works=2, seed=k)
            scene.world.actors[victim].mortal = k
            scene.run()
            assert scene.world.actors[victim].dead
            scene.check_ended((PeerDead, RemoteAbort), {scene.names[victim]})
            ended.add(tuple(sum(o.error is None for o in scene.outcomes[i]) for i in scene.survivors()))
    assert {0, 1} <= {count for counts in ended for count in counts}


def broken_edge(scene: Scene, edge: int, when_s: float, how: str) -> set[int]:
    """Let something happen to the edge behind member ``edge``; whom one may suspect for it."""
    wire, n = scene.world.edges[edge], len(scene.names)
    scene.world.clock.at(when_s, wire.lose if how == "lose" else wire.fall_silent)
    return {scene.names[edge], scene.names[(edge + 1) % n]}


@pytest.mark.parametrize("n", [2, 3, 5])
def test_a_member_that_stalls_is_found_in_time(n: int) -> None:
    """The first who runs into the deadline stands beside it, and says so to all."""
    for k in range(15):
        scene = Scene(n, 6 * n, nature=Nature(2, delays(random.Random(k)), timeout_s=0.5), works=2, seed=k)
        victim = k % n

        def stall(scene: Scene = scene, victim: int = victim) -> None:
            scene.world.actors[victim].stalled = True

        scene.world.clock.at(k * 4e-3, stall)
        scene.run()
        scene.check_ended((PeerTimeout, RemoteAbort), {scene.names[victim]})
        last = max(n * 1e-3, k * 4e-3) + 2e-2 * (2 * n)
        assert scene.world.clock.now < last + 2 * 0.5, "later than the deadline"


@given(st.data(), st.integers(1, 16), st.integers(0, 2**32))
def test_any_schedule(data: st.DataObject, n: int, seed: int) -> None:
    chance = random.Random(seed)
    nature = Nature(data.draw(st.integers(1, 4)), delays(chance), 1.0, data.draw(st.booleans()))
    relays = sorted(data.draw(st.sets(st.integers(0, n - 1))))
    elements = data.draw(st.integers(0, 60))
    scene = Scene(n, elements, data.draw(st.integers(1, 3)), nature, 2, relays, seed, data.draw(st.integers(0, 3)))
    what = data.draw(st.sampled_from(["nothing", "death", "lose", "silent"])) if n > 1 else "nothing"
    position, when_s = data.draw(st.integers(0, n - 1)), data.draw(st.floats(0, 0.3))
    if what == "nothing":
        scene.run()
        scene.check_ended((), set())
    elif what == "death":
        scene.world.clock.at(when_s, scene.world.actors[position].die)
        scene.run()
        scene.check_ended((PeerDead, RemoteAbort), {scene.names[position]})
    else:
        suspects = broken_edge(scene, position, when_s, what)
        scene.run()
        scene.check_ended((PeerDead if what == "lose" else PeerTimeout, RemoteAbort), suspects)

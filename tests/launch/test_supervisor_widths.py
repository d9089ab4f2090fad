"""A replica without a place holds up nobody, and starts as soon as there is one.

One that has lost hosts goes on with fewer ranks, and has all of them again when the hosts are back.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from ft_hsdp.config import parse
from ft_hsdp.core.restart import REFILL_STEPS
from ft_hsdp.errors import EXIT_CONFIG, EXIT_HARDWARE, EXIT_LEFT, EXIT_UNREACHABLE, EXIT_USAGE
from ft_hsdp.launch import replica_place
from ft_hsdp.launch.backend.base import COLD, ProcessWatch, ReplicaSpec
from ft_hsdp.launch.backend.hosts import EmulatedHosts
from ft_hsdp.launch.failures import Outcome
from ft_hsdp.launch.lighthouse_link import LighthouseLink
from ft_hsdp.launch.progress import Progress
from ft_hsdp.launch.run.directory import Row, RunDir
from ft_hsdp.launch.supervisor import ReplicaSupervisor
from ft_hsdp.memory.replacement import MOVE_AFTER
from tests.support.waiting import async_until

PLACE_S = 0.05
ALL = ["r0h0", "r0h1", "r0h2", "r0h3"]


class Rank:
    """A rank without a process: it leaves when it is told to, and ends when it is killed."""

    pid, machine = 1, "somewhere"

    def __init__(self, backend: Hosts, watch: ProcessWatch, rank: int, host: str) -> None:
        self._backend, self._watch, self._rank = backend, watch, rank
        self.host = host
        self.ended = False

    def exits(self, code: int) -> None:
        if not self.ended:
            self.ended = True
            self._watch.exited(self._rank, self, code)

    def signal(self, number: int) -> None:
        if number == signal.SIGKILL:
            self.exits(-number)
        elif number == signal.SIGTERM:
            self._backend.told_to_leave(self, self._rank)


class Hosts:
    """A backend of emulated hosts, without processes."""

    warm = False

    def __init__(self, hosts: EmulatedHosts, least: int) -> None:
        self.hosts, self.least = hosts, least
        self.down: list[str] = []
        self.waiting: set[int] = set()
        self.searches = 0  # how often a replica has waited for a place
        self.started: list[tuple[str, ...]] = []  # the hosts of each incarnation
        self.ranks: list[Rank] = []  # of the newest one
        self.lent: list[int] = []
        self.cordoned: list[str] = []
        self.startable = asyncio.Event()
        self.startable.set()
        self.cancelled = 0  # starts
        self.begins: Callable[[], None] = lambda: None  # what happens as an incarnation starts
        self.told_to_leave: Callable[[Rank, int], None] = lambda rank, _: rank.exits(EXIT_LEFT)

    def away(self, replica: int) -> tuple[list[str], set[int]]:
        return list(self.down), self.waiting - {replica}

    async def open(self) -> None: ...

    async def place(self, replica: int) -> None:
        self.searches += 1
        self.waiting.add(replica)
        try:
            await async_until(lambda: self.hosts.place(replica, *self.away(replica)) is not None, "a place")
        finally:
            self.waiting.discard(replica)

    def shrink(self, replica: int, least: int) -> int:
        return self.hosts.shrink(replica, *self.away(replica), max(least, self.least))

    def lend(self, replica: int) -> None:
        self.lent.append(replica)
        self.hosts.lend(replica)

    def could_grow(self, replica: int) -> bool:
        return self.hosts.could_grow(replica, *self.away(replica))

    def vacancy(self, replica: int) -> str:
        return self.hosts.vacancy(replica, self.down)

    def lost_hosts(self, replica: int) -> tuple[str, ...]:
        return self.hosts.lose(replica, self.down)

    def cordon(self, replica: int, host: str, reason: str, broken: bool) -> bool:
        self.cordoned.append(host)
        return True

    def vacated(self, replica: int) -> None: ...

    async def start(self, spec: ReplicaSpec, watch: ProcessWatch) -> str:
        try:
            await self.startable.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        names = self.hosts.of(spec.replica)
        self.started.append(tuple(dict.fromkeys(names)))
        self.ranks = [Rank(self, watch, rank, names[rank]) for rank in range(spec.size)]
        for number, rank in enumerate(self.ranks):
            watch.started(number, rank)
        asyncio.get_running_loop().call_soon(self.begins)
        return COLD

    def settled(self, spec: ReplicaSpec) -> None: ...

    def committed(self, spec: ReplicaSpec) -> None: ...

    async def close(self) -> None: ...


class Scene:
    """A supervisor of replica 0, which has four hosts of one rank, and goes on with two."""

    def __init__(self, run: RunDir, **settings: Any) -> None:
        sections = {
            "hosts": {"per_replica": 4},
            "memory": {"shrink_to": 2},
            "timeouts": {"place_s": PLACE_S, "stop_s": 1.0, **settings},
            "restart": {"budget": 2, "backoff_s": 0.0},
        }
        config = parse({"replicas": 2, "ranks_per_replica": 4, **sections})
        self.run = run
        self.task: asyncio.Task[Outcome]  # of `ReplicaSupervisor.run`
        run.commits(0).parent.mkdir(parents=True)
        self.backend = Hosts(EmulatedHosts(4, 4), 2)
        self.progress = Progress()
        self.progress.saw(5)
        self.events: list[Row] = []
        self.others_run = False
        self.link = LighthouseLink(("http://nowhere",), "secret", self.progress, lambda *_: None)
        self.link.holds = lambda _: True  # type: ignore[method-assign]
        self.supervisor = ReplicaSupervisor(
            0,
            config,
            run,
            backend=self.backend,
            link=self.link,
            progress=self.progress,
            emit=self.events.append,
            survivors=lambda: self.others_run,
        )

    def named(self, *names: str) -> list[Row]:
        return [event for event in self.events if event["event"] in names]

    @property
    def changes(self) -> list[tuple[int, int]]:
        return [(event["from"], event["to"]) for event in self.named("Shrunk", "Grown")]

    def trains(self) -> None:
        """The incarnation that runs contributes to a step."""
        assert self.supervisor.current is not None
        self.progress.saw(self.progress.step + 1)
        row = {"step": self.progress.step, "incarnation": self.supervisor.current.name, "role": "contribute"}
        with self.run.commits(0).open("a") as file:
            file.write(json.dumps(row) + "\n")

    def ends_narrow(self, code: int) -> None:
        """Rank 0 ends if there are fewer ranks than all; the others train meanwhile."""
        if len(self.backend.ranks) < 4:
            self.progress.saw(self.progress.step + 1)
            self.backend.ranks[0].exits(code)

    async def runs(self, count: int) -> None:
        """Wait until that many incarnations were started, and the last one runs."""
        await async_until(lambda: len(self.named("ReplicaStarted")) >= count, f"start {count}")

    async def loses(self, *hosts: str, starts: int) -> None:
        """Lose hosts with their ranks, and wait for the next start."""
        self.backend.down += hosts
        for rank in self.backend.ranks:
            if rank.host in hosts:
                rank.exits(-signal.SIGKILL)
        await self.runs(starts)


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_place, "LOOK_S", 0.005)


@asynccontextmanager
async def play(run: RunDir, kind: str | None = "stopped", **settings: Any) -> AsyncIterator[Scene]:
    """A supervisor that runs, and looks often; it ends as ``kind`` says, or None: by an error."""
    scene = Scene(run, **settings)
    scene.task = asyncio.create_task(scene.supervisor.run())
    try:
        yield scene
        await scene.supervisor.stop(grace_s=1)
        assert kind is None or (await scene.task).kind == kind
    finally:
        scene.task.cancel()


async def test_a_replica_shrinks_and_grows_when_its_host_is_back(run_dir: RunDir) -> None:
    """It leaves only after a commit. Only the lost host costs a restart of the budget."""
    async with play(run_dir) as scene:
        await scene.runs(1)
        await scene.loses("r0h3", starts=2)
        assert scene.backend.started[1] == ("r0h0", "r0h1", "r0h2")
        scene.backend.down = []
        await asyncio.sleep(0.05)
        assert len(scene.backend.started) == 2, "it has committed nothing yet"
        scene.trains()
        await scene.runs(3)
        assert len(scene.backend.started[2]) == 4
        assert scene.changes == [(4, 3), (3, 4)]
        assert len(scene.named("RestartScheduled")) == 1
        assert not scene.named("ReplicaUnplaced")


async def test_one_that_waits_goes_on_as_soon_as_enough_hosts_are_back(run_dir: RunDir) -> None:
    async with play(run_dir) as scene:
        scene.backend.down = ["r0h1", "r0h2", "r0h3"]
        await async_until(lambda: scene.backend.lent == [0], "it lends the host that is left")
        await asyncio.sleep(3 * PLACE_S)
        assert len(scene.named("ReplicaUnplaced")) == 1, "it is said once"
        scene.backend.down = ["r0h2", "r0h3"]
        await scene.runs(1)
        assert scene.backend.started == [("r0h0", "r0h1")]
        assert scene.changes == [(4, 2)]


async def test_one_that_lost_a_host_before_the_first_commit_goes_on_after_it(run_dir: RunDir) -> None:
    async with play(run_dir) as scene:
        scene.progress.step = 0
        scene.backend.down = ["r0h3"]
        await async_until(lambda: scene.named("ReplicaUnplaced"), "it waits")
        await asyncio.sleep(2 * PLACE_S)
        assert not scene.backend.started
        scene.progress.saw(1)
        await scene.runs(1)
        assert scene.backend.started == [("r0h0", "r0h1", "r0h2")]


async def test_after_a_failure_with_fewer_ranks_it_waits_for_no_host(run_dir: RunDir) -> None:
    """It has waited before it shrank, and no other host is lost."""
    async with play(run_dir) as scene:
        await scene.runs(1)
        await scene.loses("r0h3", starts=2)
        for _ in range(10):
            scene.trains()
        searches = scene.backend.searches
        scene.backend.ranks[0].exits(1)
        await scene.runs(3)
        assert scene.backend.searches == searches
        assert scene.backend.started[2] == ("r0h0", "r0h1", "r0h2")
        assert scene.changes == [(4, 3)]


@pytest.mark.parametrize("leave", [(), (0,), (0, 1, 2)], ids=["none", "one", "all"])
async def test_one_that_does_not_leave_in_time_to_grow_is_killed_and_uses_no_budget(run_dir, leave) -> None:
    """Nor does the kill count against a host, however many of its ranks have left."""
    async with play(run_dir, stop_s=0.05) as scene:
        scene.backend.told_to_leave = lambda rank, n: rank.exits(EXIT_LEFT) if n in leave else None
        scene.others_run = True
        await scene.runs(1)
        for n in range(MOVE_AFTER):
            await scene.loses("r0h3", starts=2 + 2 * n)
            scene.trains()
            scene.backend.down = []
            await scene.runs(3 + 2 * n)
            for _ in range(REFILL_STEPS):
                scene.trains()
        assert scene.changes == [(4, 3), (3, 4)] * MOVE_AFTER
        assert len(scene.named("RestartScheduled")) == MOVE_AFTER, "the lost hosts"
        assert not scene.backend.cordoned
        scene.backend.told_to_leave = lambda rank, _: rank.exits(EXIT_LEFT)


async def test_a_rank_that_fails_as_it_leaves_to_grow_uses_the_budget(run_dir: RunDir) -> None:
    async with play(run_dir) as scene:
        scene.backend.told_to_leave = lambda rank, n: rank.exits(1 if n == 0 else EXIT_LEFT)
        await scene.runs(1)
        await scene.loses("r0h3", starts=2)
        scene.trains()
        scene.backend.down = []
        await scene.runs(3)
        assert len(scene.named("RestartScheduled")) == 2
        scene.backend.told_to_leave = lambda rank, _: rank.exits(EXIT_LEFT)


async def test_an_error_as_it_looks_for_a_host_ends_the_supervisor(run_dir: RunDir) -> None:
    """Otherwise the replica would never grow, and no line would say why."""

    def breaks(replica: int) -> bool:
        raise OSError("no list of hosts")

    async with play(run_dir, None) as scene:
        await scene.runs(1)
        await scene.loses("r0h3", starts=2)
        scene.backend.could_grow = breaks  # type: ignore[method-assign]
        scene.trains()
        with pytest.raises(OSError, match="no list of hosts"):
            await scene.task
        assert all(rank.ended for rank in scene.backend.ranks)


async def test_a_host_that_is_lost_after_the_order_to_leave_does_not_hold_it_up(run_dir: RunDir) -> None:
    """It leaves to grow, and another host is lost: it goes on with as many ranks as before, on other hosts."""
    async with play(run_dir) as scene:

        def leaves(rank: Rank, _: int) -> None:
            scene.backend.down = ["r0h0"]
            rank.exits(EXIT_LEFT)

        await scene.runs(1)
        await scene.loses("r0h3", starts=2)
        scene.backend.told_to_leave = leaves
        scene.trains()
        scene.backend.down = []
        await scene.runs(3)
        assert scene.backend.started[2] == ("r0h1", "r0h2", "r0h3")
        scene.backend.told_to_leave = lambda rank, _: rank.exits(EXIT_LEFT)
        scene.trains()
        scene.backend.down = []
        await scene.runs(4)
        assert scene.changes == [(4, 3), (3, 4)]
        assert len(scene.named("RestartScheduled")) == 1


OUT_OF_MEMORY = {"SIGKILL": -signal.SIGKILL, "CUDA": 1, "refused": EXIT_CONFIG, "usage": EXIT_USAGE}


@pytest.mark.parametrize("how", OUT_OF_MEMORY)
async def test_fewer_ranks_that_do_not_fit_cost_no_budget_and_no_host(run_dir: RunDir, how: str) -> None:
    """They are tried twice; then the replica lends its hosts, and waits for all that it had."""
    async with play(run_dir) as scene:
        scene.backend.begins = lambda: scene.ends_narrow(OUT_OF_MEMORY[how])
        await scene.runs(1)
        scene.others_run = True
        await scene.loses("r0h3", starts=3)
        await async_until(lambda: scene.backend.lent == [0], "it lends its hosts")
        assert [len(hosts) for hosts in scene.backend.started] == [4, 3, 3]
        (told,) = scene.named("TooFewRanks")
        assert told["ranks"] == 3
        assert len(scene.named("ReplicaUnplaced")) == 1
        scene.backend.down += ["r0h2"]
        await asyncio.sleep(2 * PLACE_S)
        assert len(scene.backend.started) == 3, "two ranks need still more memory"
        assert not scene.backend.cordoned
        scene.backend.down = []
        await scene.runs(4)
        assert len(scene.backend.started[3]) == 4
        assert scene.changes == [(4, 3), (3, 4)]
        reasons = [event["reason"] for event in scene.named("RestartScheduled")]
        assert len([why for why in reasons if "none of the budget" not in why]) == 1, "the lost host"


async def test_all_ranks_begin_anew_also_for_fewer_ones(run_dir: RunDir) -> None:
    async with play(run_dir) as scene:
        scene.backend.begins = lambda: scene.ends_narrow(-signal.SIGKILL)
        await scene.runs(1)
        await scene.loses("r0h3", starts=3)
        await async_until(lambda: scene.backend.lent == [0], "it lends its hosts")
        scene.backend.begins = lambda: None
        scene.backend.down = []
        await scene.runs(4)
        for _ in range(REFILL_STEPS):
            scene.trains()
        await scene.loses("r0h2", starts=5)
        assert scene.backend.started[4] == ("r0h0", "r0h1", "r0h3")


@pytest.mark.parametrize("code", [EXIT_HARDWARE, EXIT_UNREACHABLE])
async def test_what_says_nothing_about_their_number_is_judged_as_before(run_dir: RunDir, code: int) -> None:
    async with play(run_dir) as scene:
        await scene.runs(1)
        await scene.loses("r0h3", starts=2)
        scene.backend.ranks[0].exits(code)
        await async_until(lambda: len(scene.named("RestartScheduled")) == 2, "what is done about it")
        assert scene.backend.cordoned == (["r0h0"] if code == EXIT_HARDWARE else [])
        assert "fewer ranks" not in scene.named("RestartScheduled")[1]["reason"]


async def test_fewer_ranks_that_have_contributed_use_the_budget(run_dir: RunDir) -> None:
    """They fit: what ends them now is not their number."""
    async with play(run_dir, "lost") as scene:
        await scene.runs(1)
        await scene.loses("r0h3", starts=2)
        for _ in range(REFILL_STEPS):
            scene.trains()
        for starts in (3, 4):
            scene.backend.ranks[0].exits(1)
            await scene.runs(starts)
        scene.backend.ranks[0].exits(1)
        await async_until(lambda: scene.named("ReplicaLost"), "the end of the budget")
        assert not scene.named("TooFewRanks")


# None of its hosts is there.


async def test_the_others_need_not_wait_for_one_without_a_place_until_it_starts(run_dir: RunDir) -> None:
    async with play(run_dir) as scene:
        scene.backend.down = [*ALL]
        await async_until(lambda: scene.named("ReplicaUnplaced"), "the word that there is no place")
        report = scene.link.current_report
        assert (report.running, report.exited, report.lost, report.ended) == ({}, (), (0,), ())
        await async_until(lambda: scene.backend.lent == [0], "the others may have its hosts")
        scene.backend.down = []
        await scene.runs(1)
        report = scene.link.current_report
        assert (report.lost, list(report.running)) == ((), [0])


@pytest.mark.parametrize(("how", "kind"), [("stop", "stopped"), ("finished", "unplaced"), ("halted", "lost")])
async def test_it_looks_for_a_place_until_the_job_ends(run_dir: RunDir, how: str, kind: str) -> None:
    async with play(run_dir, kind) as scene:
        scene.backend.down = [*ALL]
        await async_until(lambda: scene.named("ReplicaUnplaced"), "the word that there is no place")
        if how != "stop":
            scene.progress.saw(9, finished=how == "finished", halted="no copy is left" if how == "halted" else "")
            await scene.task
    assert not scene.backend.waiting


async def test_a_drain_ends_the_search_and_counts_against_no_budget(run_dir: RunDir) -> None:
    async with play(run_dir) as scene:
        scene.backend.down = [*ALL]
        await async_until(lambda: scene.named("ReplicaUnplaced"), "the word that there is no place")
        scene.progress.saw(6, drained=frozenset({0}))
        await async_until(lambda: scene.supervisor.resting, "the rest")
        scene.progress.saw(6, drained=frozenset())
        await async_until(lambda: len(scene.named("ReplicaUnplaced")) == 2, "another search")
        scene.backend.down = []
        await scene.runs(1)
        assert not scene.named("RestartScheduled")


async def test_a_start_that_takes_long_is_given_up_when_the_replica_is_stopped(run_dir: RunDir) -> None:
    async with play(run_dir) as scene:
        scene.backend.startable.clear()
        await async_until(lambda: scene.supervisor.current is not None, "the start")
    assert scene.backend.cancelled == 1

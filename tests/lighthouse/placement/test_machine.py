"""Where replicas run, and what follows when a rank, a host or the lighthouse is lost."""

from dataclasses import replace
from typing import Any

import pytest

from ft_hsdp.analysis.failures import Failures
from ft_hsdp.core.grant import Grant, Member, Role, ranges
from ft_hsdp.core.host_report import EndedRank, HostRanks, HostReport, MachineRanks
from ft_hsdp.core.restart import RestartPolicy
from ft_hsdp.core.state_id import initial
from ft_hsdp.errors import EXIT_CONFIG, EXIT_HARDWARE, EXIT_LEFT, EXIT_UNREACHABLE
from ft_hsdp.memory.hosts import Host
from lighthouse.placement.machine import decide, refusal
from lighthouse.placement.signs import assigned, fate, listed_hosts, placed, seen
from lighthouse.placement.state import RETURN_S, PlacedReplica, PlacementPolicy, ReplicaPhase
from lighthouse.quorum.commands import CULPRIT_S, CommandPlan, Culprit, Impossible, plan, plan_culprit
from lighthouse.quorum.events import Commanded, Event, HostClosed, Note, ProcessesReported, Ticked, Withdrawn
from lighthouse.quorum.state import LighthouseState, Policy
from tests.support.lighthouse.lighthouse_helpers import restarted

EVICT_S, PLACE_S = 2.0, 5.0


class World:
    """A lighthouse and hosts whose agents do at once what they are assigned."""

    def __init__(self, *hosts: str, replicas: int = 2, each: int = 2, **policy: Any) -> None:
        placing = PlacementPolicy(each, 2 * each, RestartPolicy(3, 0.0), place_s=PLACE_S, together_s=1.0)
        settings = Policy(replicas, steps=100, evict_s=EVICT_S, placing=replace(placing, **policy))
        self.s = LighthouseState.empty(settings, term=1)
        self.now, self.notes = 100.0, list[Note]()
        self.has: dict[str, dict[str, HostRanks]] = {}
        self.number = 0
        self.lives, self.spaces = dict[str, str](), dict[str, str]()
        self.cut, self.leaving = set[str](), set[str]()
        self.bound, self.homes = dict[str, int](), dict[str, tuple[int, int]]()
        self.only, self.warm = dict[str, tuple[int, ...]](), set[str]()
        for host in hosts:
            self.join(host)
        self.settle()

    def join(self, host: str, life: str = "a", space: str = "here") -> None:
        self.lives[host], self.spaces[host], self.has[host] = life, space, {}

    def apply(self, event: Event) -> None:
        self.s, effects = decide(self.s, event)
        self.notes += [each for each in effects if isinstance(each, Note)]

    def report(self, host: str, *, obeys: bool = True) -> HostReport:
        """Have the agent of a host report, and do what it is assigned."""
        has, name = self.has[host], Host.parse(host).name
        known = seen(self.s, name) if obeys else ""
        self.number += 1
        who = (host, self.lives[host], self.spaces[host], self.number)
        report = HostReport(*who, f"127.0.0.1:{len(name)}", tuple(has.values()), host in self.leaving, known)
        report = replace(report, replica=self.bound.get(host), home=self.homes.get(host))
        report = replace(report, only=self.only.get(host, ()), warm=host in self.warm)
        self.apply(ProcessesReported({}, frozenset(), frozenset(), self.now, host=report))
        if obeys:
            mine = {each.incarnation: each for each in assigned(self.s, name)}
            for name in [*has]:
                if name not in mine:
                    del has[name]
            for each in mine.values():
                has.setdefault(each.incarnation, HostRanks(each.incarnation, each.ranks))
        return report

    def settle(self, seconds: float = 0.0) -> None:
        """Let time pass; all hosts that are not cut off report."""
        until = self.now + seconds
        while True:
            for host in [each for each in self.has if each not in self.cut]:
                self.report(host)
            self.apply(Ticked(self.now))
            if self.now >= until:
                break
            self.now += 0.25
        for _ in range(2):
            for host in [each for each in self.has if each not in self.cut]:
                self.report(host)

    def ends(self, host: str, rank: int, code: int, fed: Any = (None, False), **said: Any) -> None:
        """Have a rank end by itself."""
        ((name, mine),) = self.has[host].items()
        rest = tuple(each for each in mine.living if each != rank)
        ended = (*mine.ended, EndedRank(rank, code, **said))
        self.has[host][name] = replace(mine, living=rest, ended=ended, fed=fed[0], usable=fed[1])
        self.report(host, obeys=False)

    def leave(self, host: str, *ranks: int) -> None:
        """Have ranks of a host leave, the first two if none is named."""
        for rank in ranks or (0, 1):
            self.ends(host, rank, EXIT_LEFT)

    def contributed(self, *replicas: int) -> None:
        """Replicas have contributed to a step."""
        placed = self.s.placement
        now = (replace(me, contributed=n in replicas) for n, me in enumerate(placed.replicas))
        self.s = replace(self.s, placement=replace(placed, replicas=tuple(now)))

    def at_step(self, step: int) -> None:
        self.s = replace(self.s, head=replace(initial("c", "w"), step=step))

    def commit(self, steps: int, *replicas: int, standby: int | None = None) -> None:
        """Replicas commit steps in an epoch of their own."""
        base = self.s.head or initial("c", "w")
        roles: dict[int, Role] = {n: "standby" if n == standby else "contribute" for n in replicas}
        members = tuple(Member(n, self.me(n).incarnation, role) for n, role in roles.items())
        grant = Grant(1, self.s.epoch + 1, base, members, 2, "")
        head = replace(base, commit_epoch=grant.epoch, step=base.step + steps)
        self.s = replace(self.s, epoch=grant.epoch, grant=grant, head=head)
        self.settle()

    def restart(self, slots: int | None = None, **placing: Any) -> None:
        """The lighthouse ends, and another one begins with what it stored, and perhaps with another policy."""
        policy = self.s.policy
        assert policy.placing is not None
        placed = replace(policy.placing, **placing)
        self.s = restarted(self.s, replace(policy, slots=slots or policy.slots, placing=placed))

    def lose(self, *hosts: str, after_s: float = EVICT_S + 1) -> None:
        """Hosts are silent from now on, for so long that they count as lost."""
        self.cut |= set(hosts)
        self.settle(after_s)

    def me(self, replica: int = 0) -> PlacedReplica:
        return self.s.placement.replicas[replica]

    def told_as(self, name: str) -> list[Note]:
        return [note for note in self.notes if note.event == name]

    def told(self, name: str) -> list[str]:
        return [note.reason for note in self.told_as(name)]

    def runs(self) -> dict[str, tuple[str, ...]]:
        return {
            each.incarnation: each.used for each in self.s.placement.replicas if each.phase is ReplicaPhase.RUNS
        }


def test_replicas_start_where_there_is_a_host_for_all_their_ranks() -> None:
    w = World("z/r1/a", "z/r1/b", "z/r2/c")
    first = w.me().incarnation
    assert refusal(w.s, replace(w.report("z/r1/a"), replica=0))  # it would have all ranks of the replica
    assert w.me(1).phase is ReplicaPhase.RESTS
    w.join("z/r2/d")
    w.settle()
    assert sorted(w.runs().values()) == [("a", "b"), ("c", "d")]
    (of_b,) = assigned(w.s, "b")
    assert (of_b.incarnation, of_b.ranks, of_b.hosts) == (first, (2, 3), ("a", "a", "b", "b"))
    assert of_b.master == assigned(w.s, "a")[0].master
    assert not of_b.leaves
    w.join("z/r2/e")
    w.settle()
    assert [(row["state"], row.get("ranks")) for row in listed_hosts(w.s, w.now)][3:] == [
        ("used", [2, 3]),
        ("spare", None),
    ]


@pytest.mark.parametrize("code", [-9, 75, 70])
def test_when_a_rank_ends_the_others_are_ended_and_the_replica_starts_again_in_place(code: int) -> None:
    w = World("a", "b", replicas=1)
    w.ends("a", 0, code)
    assert (w.me().phase, assigned(w.s, "a"), assigned(w.s, "b")) == (ReplicaPhase.ENDS, (), ())
    w.report("a")
    assert w.me().phase is ReplicaPhase.ENDS  # host b has not said that its ranks are gone
    w.settle()
    assert w.runs() == {w.me().incarnation: ("a", "b")}
    assert w.me().restart.restarts == w.me().restart.used == 1
    assert (0, w.me().incarnation[:-1] + "0") in w.s.exited


def test_a_spare_host_takes_the_place_of_a_lost_one_and_nothing_else_moves() -> None:
    w = World("a", "b", "c", "d", "spare")
    assert w.runs() == {w.me(0).incarnation: ("a", "b"), w.me(1).incarnation: ("c", "d")}
    before = w.me(1).incarnation
    w.lose("d")
    assert (w.me(1).used, w.me(1).restart.used) == (("c", "spare"), 0)
    assert w.me(0).restart.restarts == 0
    assert len(w.told("HostReplaced")) == 1
    assert (1, before) in w.s.exited  # its ranks on c are gone, and it commits nothing without them


def test_a_host_that_is_lost_with_all_ranks_is_replaced_and_has_not_exited_before_it_says_so() -> None:
    w = World("a", "b", "spare", each=1)
    before, run = w.me(1).incarnation, w.me(1).run
    w.lose("b")
    assert w.me(1).used == ("spare",)
    assert (1, before) not in w.s.exited
    assert w.me(1).run != run  # the exit of a later incarnation would stand for that of this one
    w.cut.clear()
    w.settle()
    assert w.has["b"] == {}
    w.settle()
    assert (1, before) in w.s.exited
    assert w.s.placement.shadows == ()


def test_silence_of_an_agent_alone_changes_nothing() -> None:
    w = World("a", "b", "c", each=1)
    w.cut.add("a")
    for _ in range(20):
        w.now += 0.5
        asked = {0: (w.me().incarnation, w.now, 0.5)}
        w.s = replace(w.s, presence=replace(w.s.presence, asked=asked))
        w.report("b")
        w.report("c")
    assert w.me().used == ("a",)


def test_while_most_hosts_are_silent_the_lighthouse_is_cut_off() -> None:
    w = World("a", "b", "c", "d", "e")
    w.lose("a", "c", "d", after_s=3 * EVICT_S)
    w.lose("b", "e", after_s=EVICT_S)
    for host in "bdcea":  # they come back one after another
        w.cut.discard(host)
        w.settle(EVICT_S / 4)
    assert {(each.phase, each.restart.restarts) for each in w.s.placement.replicas} == {(ReplicaPhase.RUNS, 0)}


def test_a_lone_host_that_is_silent_is_not_lost_until_another_one_comes() -> None:
    w = World("a", replicas=1, each=1)
    w.lose("a", after_s=3 * EVICT_S)
    assert w.me().phase is ReplicaPhase.RUNS
    w.join("b")
    w.settle(3 * EVICT_S)
    assert w.me().used == ("b",)


def test_a_host_whose_connection_ends_is_lost_sooner() -> None:
    w = World("a", "b", "c", each=1)
    w.settle(EVICT_S)
    former = w.report("a")
    closed = w.report("a")
    w.cut.add("a")
    w.apply(HostClosed(former, w.now))
    w.settle(EVICT_S / 5)
    assert w.me().used == ("a",)  # it had sent another one meanwhile
    w.apply(HostClosed(closed, w.now))
    w.settle()
    assert w.me().used == ("c",)


def test_at_the_start_of_a_term_an_agent_whose_report_is_lost_has_time_to_send_another() -> None:
    w = World("a", "b", "c", each=1)
    for returns in (True, False):
        closed = w.report("a")
        w.cut.add("a")
        w.apply(HostClosed(closed, w.now))
        w.now += RETURN_S / 2
        w.settle()
        assert w.me().used == ("a",)
        if returns:
            w.report("a")
        w.settle(RETURN_S)
        assert w.me().used == ("a" if returns else "c",)


def test_an_agent_that_is_started_again_has_no_ranks_of_before_and_the_former_one_has_to_end() -> None:
    w = World("a", replicas=1, each=1)
    before = w.me().incarnation
    old = w.report("a")
    w.join("a", "b")
    w.settle()
    assert (0, before) in w.s.exited
    assert w.runs() == {w.me().incarnation: ("a",)}
    assert refusal(w.s, old)
    assert not refusal(w.s, replace(old, life="b"))


def test_another_machine_with_the_name_of_a_lost_one_says_nothing_of_the_ranks_there() -> None:
    w = World("a", replicas=1, each=1, lease_s=5.0)
    before = w.me().incarnation
    w.join("a", "b", "elsewhere")
    w.settle()
    assert w.runs() == {w.me().incarnation: ("a",)}
    assert (0, before) not in w.s.exited
    w.settle(5.0 + 3 * EVICT_S)
    assert (0, before) in w.s.exited  # no grant of it holds any more


def test_where_no_host_is_left_the_others_go_on_without_the_replica_or_it_has_fewer_ranks() -> None:
    for shrink_to, used, told in ((None, ("a", "b"), "ReplicaUnplaced"), (2, ("a",), "Shrunk")):
        w = World("a", "b", replicas=1, shrink_to=shrink_to)
        w.at_step(5)
        w.lose("b", after_s=EVICT_S + PLACE_S + 1)
        assert (w.me().used, len(w.told(told))) == (used, 1)
        w.contributed(0)
        w.cut.clear()
        w.settle()
        if shrink_to:
            assert assigned(w.s, "a")[0].leaves  # it can have all ranks again
            w.leave("a")
            w.settle()
        assert w.me().used == ("a", "b")


def test_a_replica_that_waits_in_vain_lends_its_host_to_another_one_and_gets_others_once_they_are_there() -> None:
    w = World("a", "b", "c", "d")
    w.lose("b", "d")
    assert (w.runs(), placed(w.s, "a"), placed(w.s, "c")) == ({}, (0,), (1,)), "what is in memory there is kept"
    w.settle(PLACE_S)
    assert w.runs() == {w.me(0).incarnation: ("a", "c")}
    assert placed(w.s, "c") == (0,)
    (lent,) = w.told_as("HostLent")
    assert (lent.facts["replica"], lent.facts["host"], lent.facts["to"]) == (1, "c", 0)
    w.cut.remove("d")
    w.settle(1.0)
    assert len(w.runs()) == 1
    w.cut.clear()
    w.settle()
    assert w.runs() == {w.me(0).incarnation: ("a", "c"), w.me(1).incarnation: ("b", "d")}
    assert len(w.told_as("HostLent")) == 1


def test_a_replica_that_is_to_start_again_later_keeps_its_hosts() -> None:
    w = World("a", "b", "c", "d", restart=RestartPolicy(3, 30.0))
    for _ in range(2):
        w.ends("a", 0, 70)
        w.settle(1.0)
    w.lose("d", after_s=EVICT_S + PLACE_S + 1)
    assert w.runs() == {}
    w.settle(30.0)
    assert w.runs() == {w.me(0).incarnation: ("a", "b")}


def test_a_replica_that_is_wanted_again_gets_hosts_that_no_other_one_has() -> None:
    w = World("a", "b", "c", "d")
    w.s = replace(w.s, drained=frozenset({0}))
    for host in "ab":
        w.leave(host, *w.has[host][w.me().incarnation].living)
    w.settle()
    assert placed(w.s, "b") == ()
    w.lose("d")
    assert w.runs() == {w.me(1).incarnation: ("c", "a")}
    assert placed(w.s, "a") == (1,)
    w.s = replace(w.s, drained=frozenset())
    w.settle(PLACE_S + 1)
    assert (len(w.runs()), w.told_as("HostLent")) == (1, [])
    w.cut.clear()
    w.settle()
    assert w.runs() == {w.me(0).incarnation: ("d", "b"), w.me(1).incarnation: ("c", "a")}


def test_of_two_replicas_with_fewer_ranks_the_one_that_gets_the_host_leaves() -> None:
    w = World("a", "b", "c", "d", shrink_to=2)
    w.at_step(5)
    w.lose("b", "d", after_s=EVICT_S + PLACE_S + 1)
    assert sorted(w.runs().values()) == [("a",), ("c",)]
    w.contributed(0, 1)
    w.cut.remove("b")
    w.settle()
    assert [assigned(w.s, host)[0].leaves for host in "ac"] == [True, False]
    w.cut = {"a"}
    w.settle(EVICT_S + 1)
    assert (sorted(w.runs().values()), w.told_as("HostLent")) == ([("c",), ("d", "b")], [])
    w.cut.clear()
    w.settle()
    assert (assigned(w.s, "c")[0].leaves, w.me(1).names) == (True, ("c", "a"))


def test_fewer_ranks_that_end_before_they_contribute_are_blamed_alone_and_not_tried_for_ever() -> None:
    w = World("a", "b", replicas=1, shrink_to=2)
    w.at_step(5)
    w.lose("b", after_s=EVICT_S + PLACE_S + 1)
    for used, told in ((("a",), 0), (("a",), 1)):
        assert w.runs() == {w.me().incarnation: used}
        w.ends("a", 0, 70)
        w.settle()
        assert (w.me().restart.used, w.me().failed_on, len(w.told("TooFewRanks"))) == (0, (), told)
    assert (w.runs(), len(w.told("ReplicaUnplaced"))) == ({}, 1)  # at once: it has waited before
    w.cut.clear()
    w.settle()
    assert w.runs() == {w.me().incarnation: ("a", "b")}
    w.ends("b", 2, 70)
    w.settle()
    assert (w.me().restart.used, w.me().failed_on) == (1, (("b", 1),))


def test_hosts_have_the_ranks_first_whose_home_they_are_and_others_once_these_do_not_need_them() -> None:
    """As under `up`, where no other host comes. That of a replica that was never started is kept for it."""
    w = World(replicas=2, each=1)
    w.s = replace(w.s, policy=replace(w.s.policy, slots=3), views=(*w.s.views, w.s.views[0]))
    w.homes = {"r2": (2, 0), "r1": (1, 0), "r0": (0, 0)}
    for host in ("r2", "r1", "r0", "s"):
        w.join(host)
    w.settle()
    assert [me.used for me in w.s.placement.replicas] == [("r0",), ("r1",), ()]
    w.cut = {"r0"}
    w.settle(EVICT_S + 1)
    assert w.me().used == ("s",)
    w.ends("s", 0, EXIT_HARDWARE)
    w.settle()
    assert w.me().given_up, "the host of replica 2 is kept for it"


@pytest.mark.parametrize(("alone", "spare"), [(True, False), (False, False), (True, True)])
def test_a_broken_host_ends_its_replica_if_no_other_one_can_come(alone: bool, spare: bool) -> None:
    w = World(replicas=1 if alone else 2, each=1)
    w.homes = {"a": (0, 0), **({} if alone else {"b": (1, 0)})}
    for host in (*w.homes, *(["s"] if spare else [])):
        w.join(host)
    w.settle()
    w.contributed(1)
    w.ends("a", 0, EXIT_HARDWARE)
    w.settle()
    assert bool(w.s.halted) == (alone and not spare)
    assert (len(w.told("HostCordoned")), bool(w.me().given_up)) == (spare, not spare)


def test_what_ends_a_replica_again_and_again_is_given_up_cordoned_or_halted() -> None:
    w = World("a", "b", replicas=1)
    for _ in range(4):
        w.ends("a", 0, 70)
        w.settle()
    assert "budget of 3" in w.me().given_up
    assert placed(w.s, "a") == ()
    assert w.s.halted.startswith("every replica is lost")


@pytest.mark.parametrize(("code", "cause", "cordoned"), [(EXIT_HARDWARE, "", 1), (-6, "hardware", 1), (-6, "", 0)])
def test_a_host_whose_kernel_or_rank_names_broken_hardware_is_cordoned_at_once(code, cause, cordoned) -> None:
    w = World("a", "b", "c", replicas=1, each=1)
    w.ends("a", 0, code, cause=cause)
    w.settle()
    assert (w.me().used, len(w.told("HostCordoned"))) == (("b",) if cordoned else ("a",), cordoned)
    assert w.s.placement.fatal.ends == ()


@pytest.mark.parametrize(
    ("code", "said", "trained", "ends"),
    [(75, "script", False, 2), (75, "script", True, 0), (75, "temporary", False, 0), (EXIT_CONFIG, "", False, 1)],
)
def test_a_script_that_ends_each_replica_before_the_first_step_ends_the_job(code, said, trained, ends) -> None:
    w = World("a", "b", each=1)
    w.s = replace(w.s, placement=replace(w.s.placement, trained=trained))
    for number in range(2):
        for host in "ab":
            if w.runs():
                w.ends(host, 0, code, cause=said, why=f"KeyError: {number}")
            w.settle(10.0)
        assert bool(w.s.halted) == (0 < ends <= number + 1)
    assert (w.s.placement.wrong, bool(w.s.halted)) == (ends > 0, ends > 0)
    assert w.told("JobHalted") == [w.s.halted] * bool(ends)
    w.restart()
    w.settle(10.0)
    assert (len(w.runs()), w.s.placement.wrong) == (2, False)  # a job that was halted is tried once more


def test_what_ends_all_is_not_blamed_on_units_though_a_commit_is_heard_of_meanwhile() -> None:
    w = World("a", "b", each=1, restart=RestartPolicy(9, 0.0))
    for step in (2, 5, 5):
        w.at_step(step)
        for host, units in (("a", (0, 5, 2)), ("b", (1, 5, 2))):
            w.ends(host, 0, 75, (units, True), cause="script")
        w.settle(5.0)
    assert w.told("BatchBlamed") == []


def test_after_the_units_of_one_replica_those_of_the_others_may_be_blamed_at_the_same_step() -> None:
    w = World("a", "b", each=1, restart=RestartPolicy(9, 0.0))
    w.at_step(20)
    for host, blamed in (("a", 0), ("a", 1), ("b", 1), ("b", 2)):
        w.ends(host, 0, 75, ((int(host == "b"), 5, 2), True), cause="script")
        w.settle(5.0)
        assert len(w.told("BatchBlamed")) == blamed


def test_a_replica_that_ended_once_at_a_step_does_not_keep_the_units_of_another_from_being_blamed() -> None:
    w = World("a", "b", each=1, restart=RestartPolicy(9, 0.0))
    w.at_step(20)
    for host in "baaaaa":
        assert w.told("BatchBlamed") == []
        w.ends(host, 0, 75, ((int(host == "b"), 5, 2), True), cause="script")
        w.settle(5.0)
    assert len(w.told("BatchBlamed")) == 1


def test_units_that_end_processes_twice_are_left_out_by_all_that_start_later() -> None:
    w = World("a", "b", each=1, restart=RestartPolicy(9, 0.0))
    units, others = (0, 5, 2), (0, 7, 2)

    def end(host: str, fed: tuple[int, int, int], usable: bool = False, code: int = -11, **said: Any) -> int:
        w.ends(host, 0, code, (fed, usable), **said)
        w.settle(5.0)
        other = tuple(replace(me, fatal=(0, 0)) for me in w.s.placement.replicas)  # the others train on
        w.s = replace(w.s, placement=replace(w.s.placement, replicas=other))
        return len(w.told("BatchBlamed"))

    assert end("a", units) == end("b", units, code=-9) == end("b", units, code=75, cause="temporary") == 0
    assert end("b", units, code=75, cause="device") == 1
    assert (assigned(w.s, "a")[0].fatal, assigned(w.s, "b")[0].fatal) == ((), (units,))
    assert end("b", others) == end("b", others) == 1  # it has not contributed since: they are not to blame
    assert (end("b", others, usable=True), end("b", others)) == (1, 2)
    assert end("a", others) == 2
    assert assigned(w.s, "a")[0].fatal == (units, others)


def test_units_are_not_blamed_for_a_step_that_has_ended_the_other_replicas_and_the_third_time_ends_the_job() -> (
    None
):
    w = World("a", "b", each=1, restart=RestartPolicy(9, 0.0))
    for number, host in enumerate("ab" * 3):
        assert not w.s.halted, number
        w.ends(host, 0, -11, ((0, 5, 2), True))
        w.settle(5.0)
    assert not w.told("BatchBlamed")
    assert w.s.halted.startswith("step 1: ")


@pytest.mark.parametrize("said", ["shortage", "changed"])
def test_what_prevents_a_start_is_told_and_so_is_its_end(said: str) -> None:
    w = World("a", replicas=1, each=1)
    w.ends("a", 0, 75)
    for _ in range(2):
        w.settle(5.0)
        w.ends("a", 0, EXIT_CONFIG, cause=said, why="it lacks something")
        w.settle()
        assert (w.me().restart.used, w.me().failed_on, len(w.told("StartPrevented"))) == (1, (), 1)
    w.settle(5.0)
    w.s = replace(w.s, presence=replace(w.s.presence, asked={0: (w.me().incarnation, w.now, 0.0)}))
    w.settle()
    assert (len(w.told("StartPrevented")), w.me().restart.prevented) == (2, 0)
    w.ends("a", 0, 75, cause=said)
    w.settle()
    assert (w.me().restart.used, len(w.told("StartPrevented"))) == (2, 2)


def test_only_a_start_that_was_prevented_is_no_failure() -> None:
    w = World("a", replicas=1, each=1, restart=RestartPolicy(9, 0.0))
    w.notes.clear()
    for said in ("device", "shortage", "", "shortage", "device", "changed"):
        w.settle(9.0)
        if said:
            w.ends("a", 0, EXIT_CONFIG if said in ("shortage", "changed") else 75, cause=said)
        else:
            ((name, mine),) = w.has["a"].items()
            w.has["a"][name] = replace(mine, living=(), failed="no process may be forked")
        w.settle()
    failures = Failures(1)
    for seq, note in enumerate(w.notes):
        failures.event(seq, note.event, {"t": float(seq), "reason": note.reason, **note.facts})
    assert len(w.told("ReplicaExited")) == 6
    assert [each.life.incarnation[-1] for each in failures.losses()] == ["0", "4"]


def test_only_its_hosts_are_believed_about_the_ranks_of_a_replica_that_is_placed() -> None:
    w = World("a", replicas=1, each=1)
    name = w.me().incarnation
    gone = MachineRanks(name, "a", 1, gone=True)
    for running in (None, "0-other-0"):
        report = {0: running}, frozenset({(0, name)}), frozenset({0}), w.now
        w.apply(ProcessesReported(*report, machines=(gone,)))
    assert w.s.exited == frozenset()
    assert ((view := w.s.views[0]).incarnation, view.down, view.lost) == (name, False, False)


def of_replica_1(*hosts: str) -> World:
    """A job of two replicas of which a launcher has started the second one; another one has the first."""
    w = World(each=1)
    w.bound |= dict.fromkeys(hosts, 1)
    for host in hosts:
        w.join(host)
        w.settle()
    return w


def test_a_host_of_one_replica_runs_that_alone_and_a_second_one_stands_by() -> None:
    w = of_replica_1("a", "b")
    w.settle(2 * PLACE_S)
    assert w.runs() == {w.me(1).incarnation: ("a",)}
    assert not w.s.views[0].lost
    w.join("c")
    w.settle()
    w.lose("c")
    assert (w.me(0).phase, w.me(0).used) == (ReplicaPhase.RESTS, ("c",))  # b is not for replica 0
    w.cut = {"a"}
    w.settle(EVICT_S + 1)
    assert w.me(1).used == ("b",)
    w.leaving.add("b")
    w.leave("b")
    w.settle()
    assert w.s.views[1].lost  # nobody waits for it


@pytest.mark.parametrize(("code", "times", "why"), [(70, 4, "budget of 3"), (EXIT_HARDWARE, 1, "")])
def test_a_replica_that_is_given_up_is_tried_again_by_the_next_process_that_is_started_for_it(
    code, times, why
) -> None:
    w = of_replica_1("a")
    for _ in range(times):
        assert fate(w.s, w.report("a")) == (False, "")
        w.ends("a", 0, code)
        w.settle()
    ended, reason = fate(w.s, w.report("a"))
    assert (ended, why in reason, bool(reason), w.s.halted) == (False, True, True, "")
    w.bound["b"] = 1
    w.join("b", "b")
    w.settle()
    assert (w.me(1).phase, w.me(1).restart.restarts) == (ReplicaPhase.RUNS, times)  # no incarnation has its name


def test_a_replica_whose_script_is_done_has_ended_for_its_host() -> None:
    w = of_replica_1("a")
    ((name, mine),) = w.has["a"].items()
    w.has["a"][name] = replace(mine, living=(), ended=tuple(EndedRank(r, 0) for r in (0, 1)), done=True)
    w.settle()
    assert fate(w.s, w.report("a")) == (True, "")
    assert not w.s.finished


@pytest.mark.parametrize("finished", [False, True])
def test_a_rank_may_go_on_alone_only_after_the_last_step(finished: bool) -> None:
    w = World("a", replicas=1, each=1)
    w.ends("a", 0, 0)
    w.s = replace(w.s, finished=finished)
    w.settle(5.0)
    assert bool(w.told_as("ReplicaExited")) is not finished


@pytest.mark.parametrize(("code", "used"), [(-9, 3), (EXIT_UNREACHABLE, 1)])
def test_a_host_is_not_left_for_what_comes_from_outside(code: int, used: int) -> None:
    w = World("a", "b", "c", each=1)
    for step in (1, 2, 3):
        w.at_step(step)  # the other replica trains
        w.ends("a", 0, code)
        w.settle(10.0)
    assert (w.me().used, w.me().restart.used) == (("a",), used)


@pytest.mark.parametrize(("beside", "used"), [(True, "c"), (False, "a")])
def test_a_host_that_ends_ranks_again_and_again_is_left_if_others_train_beside_them(
    beside: bool, used: str
) -> None:
    w = World("a", "b", "c", each=1, restart=RestartPolicy(9, 0.0))
    for step in (1, 2, 3):
        w.at_step(step)
        w.contributed(0, *([1] if beside else []))
        w.ends("a", 0, -11)
        w.settle(10.0)
    assert w.me().used == (used,)


@pytest.mark.parametrize("standby", [None, 0])
@pytest.mark.parametrize(("own", "healthy"), [((1,), False), ((6, 3), False), ((6, 4), True)])
def test_steps_that_others_commit_without_a_replica_are_no_progress_of_it(
    own: tuple[int, ...], healthy: bool, standby: int | None
) -> None:
    w = World("a", "b", "c", each=1)
    for _ in range(3):
        w.commit(12, 1)  # while it is started
        for steps in own:
            w.commit(steps, 0, 1, standby=standby)
            w.commit(12, 1)  # without it again
        w.ends("a", 0, 70)
        w.settle(10.0)
    assert (w.me().used, w.me().restart.used) == ((("a",), 1) if healthy else (("c",), 3))


def test_a_replica_with_fewer_ranks_that_stands_by_has_started_and_leaves_to_have_all() -> None:
    w = World("a", "b", "c", "d", shrink_to=2)
    w.at_step(5)
    w.lose("d", after_s=EVICT_S + PLACE_S + 1)
    w.commit(1, 0, 1, standby=1)
    w.cut.clear()
    w.settle()
    (narrow,) = assigned(w.s, "c")
    assert (narrow.hosts, narrow.trains, narrow.leaves) == (("c", "c"), True, True)


def test_a_host_that_is_told_to_end_gives_its_ranks_to_a_spare_one() -> None:
    w = World("a", "b", replicas=1, each=1)
    w.leaving.add("a")
    w.report("a")
    assert assigned(w.s, "a")[0].leaves
    w.leave("a")
    w.settle()
    assert (w.me().used, w.me().restart.used) == (("b",), 0)


@pytest.mark.parametrize(("ends", "told"), [(("a",), 1), (("a", "b"), 0)])
def test_a_replica_whose_host_is_told_to_end_has_no_place_unless_all_hosts_are(
    ends: tuple[str], told: int
) -> None:
    w = World("a", "b", each=1)
    w.leaving.update(ends)
    for host in ends:
        w.report(host)
    w.leave("a")
    w.settle()
    assert len(w.told("ReplicaUnplaced")) == told


def test_after_the_lighthouse_was_started_again_all_stays_where_it_is() -> None:
    w = World("a", "b", "c", each=1)
    w.restart()
    before = w.s.placement
    w.now = 7.0
    w.report("b")
    w.settle(EVICT_S / 2)
    assert w.s.placement == before
    w.lose("a", after_s=2 * EVICT_S)
    assert w.me().used == ("c",)


def views(w: World) -> list[tuple[bool | None, bool, bool]]:
    return [(view.down, view.lost, view.ended) for view in w.s.views]


def test_a_lighthouse_that_was_started_again_knows_who_rests_is_given_up_or_done() -> None:
    w = World("a", "b", "c", "d", "e", each=1, replicas=5)
    for _ in range(4):
        w.ends("a", 0, -9)
        w.settle(61.0)
    w.apply(Commanded("drain", 1, "a new fan", w.now))
    w.leave("b")
    w.has["c"][w.me(2).incarnation] = replace(w.has["c"][w.me(2).incarnation], done=True)
    for rank in (0, 1):
        w.ends("c", rank, 0)
    w.settle()
    w.apply(Commanded("drain", 3, "a new fan", w.now))
    w.lose("d")
    rest = [(True, True, False), (True, False, False), (True, True, True)]
    for restarts in range(2):
        assert views(w)[:3] == rest
        assert not w.s.views[3].down, "its host is silent"
        assert not w.s.views[4].down
        if not restarts:
            w.restart()
            w.settle()
    w.cut.clear()
    w.settle()
    assert [w.s.views[n].down for n in (3, 4)] == [True, None]


def test_replicas_that_rest_get_hosts_by_another_number_of_hosts_or_of_replicas() -> None:
    for hosts in (1, 4):
        w = World("a", "b", "c", "d", shrink_to=1)
        w.s = replace(w.s, drained=frozenset({1}))
        w.leave("c")
        w.leave("d", 2, 3)
        w.settle()
        w.s = replace(w.s, drained=frozenset())
        w.restart(slots=3, hosts=hosts)
        w.lose(*"abcd")
        for host in "abcdefgh":
            w.join(host, life="b", space="there")
            w.cut.discard(host)
            w.settle()
        w.settle(PLACE_S / 2)
        assert [len(w.me(n).used) for n in range(2)] == [hosts] * 2
        assert (w.told_as("Shrunk"), w.told_as("Grown"), len(w.s.placement.replicas)) == ([], [], 3)


def test_what_does_not_ask_for_a_step_is_started_again() -> None:
    w = World("a", replicas=1, each=1, start_s=3.0)
    before = w.me().incarnation
    w.s = replace(w.s, presence=replace(w.s.presence, asked={0: (before, w.now, 0.0)}))
    w.settle(4.0)
    assert w.me().incarnation == before
    for contributors in ((), (0,)):  # the last lighthouse has left one out, and ended
        w.contributed(*contributors)
        before = w.me().incarnation
        w.s = replace(w.s, presence=replace(w.s.presence, asked={}))
        w.settle(4.0)
        assert w.me().incarnation != before


def test_an_order_to_kill_an_incarnation_and_one_about_a_host_end_it() -> None:
    w = World("a", "b", "c", each=1)
    before = w.me().incarnation
    w.apply(Withdrawn((0, before), "it is silent", w.now))
    w.settle()
    assert w.told("ReplicaExited")[-1] == "it is silent"
    w.cut.add("b")
    w.apply(Commanded("host-lost", 0, "it burnt", w.now, host="b"))
    w.settle()
    assert w.me(1).used == ("c",)
    assert w.me(0).incarnation != before


@pytest.mark.parametrize(
    ("code", "cause", "kind"), [(75, "", "evicted"), (75, "hardware", "exit 75"), (70, "", "exit 70")]
)
def test_a_rank_that_sees_another_one_evicted_is_not_what_ended_its_replica(
    code: int, cause: str, kind: str
) -> None:
    w = World("a", replicas=1, each=1)
    w.apply(Withdrawn((0, w.me().incarnation), "it hangs", w.now))
    w.ends("a", 0, code, cause=cause)
    w.settle()
    (note,) = w.told_as("ReplicaExited")
    assert note.facts["kind"] == kind
    assert note.reason.startswith("rank 0 ended with") is (cause == "hardware")


def order(w: World, action: Any, host: str, *, force: bool = False) -> bool:
    command = Commanded(action, 0, "a new fan", w.now, host=host)
    possible = isinstance(plan(w.s, command, force=force), CommandPlan)
    if possible:
        w.apply(command)
    return possible


def state_of(w: World, host: str) -> tuple[object, object]:
    (row,) = [row for row in listed_hosts(w.s, w.now) if row["host"] == host]
    return row["state"], row["replica"]


def test_the_ranks_of_a_drained_host_move_to_a_spare_one_and_it_gets_none_until_it_is_undrained() -> None:
    w = World("a", "b", "c", "d", "e")
    assert order(w, "drain-host", "b")
    assert [assigned(w.s, name)[0].leaves for name in "abc"] == [True, True, False]
    assert not order(w, "drain-host", "c"), "the spare host is promised"
    w.leave("a")
    w.leave("b", 2, 3)
    w.restart()
    w.settle()
    assert (w.me().used, w.me().restart.used, w.me(1).restart.restarts) == (("a", "e"), 0, 0)
    assert w.told("HostReplaced")[0].endswith("a new fan")
    w.lose("e")
    assert [state_of(w, name) for name in "abe"] == [("waiting", None), ("cordoned", None), ("silent", None)]
    order(w, "undrain-host", "b")
    w.settle()
    assert w.me().used == ("a", "b")


def test_a_host_is_drained_without_a_spare_one_only_by_force_and_one_without_ranks_always() -> None:
    w = World("a", "b", each=1)
    assert not order(w, "drain-host", "a")
    assert order(w, "drain-host", "a", force=True)
    w.leave("a")
    w.settle()
    w.join("c")
    w.join("d")
    w.settle()
    assert order(w, "drain-host", "d")
    w.leaving.add("d")
    w.report("d")
    assert (w.me().used, state_of(w, "d")) == (("c",), ("cordoned", None))


def test_a_host_of_one_zone_has_ranks_of_its_replicas_alone() -> None:
    w = World(each=1, replicas=3)
    w.only = {"a": (0, 2), "b": (0, 2), "c": (1,), "d": (1,)}
    for host in "abcd":
        w.join(host)
    w.settle()
    assert [w.me(replica).used for replica in range(3)] == [("a",), ("c",), ("b",)]
    w.lose("a", "c", after_s=EVICT_S + PLACE_S + 1)
    assert (w.me(0).phase, w.me(1).used) == (ReplicaPhase.RESTS, ("d",))
    w.only = dict.fromkeys("abcd", (0, 1, 2))
    w.ends("d", 0, EXIT_HARDWARE)
    w.settle()
    assert [name for name, _ in w.s.placement.cordoned] == ["d"]
    assert order(w, "drain-host", "b")  # its launcher gives another one


def test_a_replica_moves_to_the_host_where_its_ranks_wait_only_if_another_one_trains() -> None:
    for trains in (False, True):
        w = World("a", "b", "c", each=1)
        if trains:
            w.contributed(1)
        w.warm = {"c"}
        w.ends("a", 0, 1)
        w.settle()
        assert w.me().used == ("c" if trains else "a",)
        assert placed(w.s, "a") == (() if trains else (0,))
        assert [each.facts["host"] for each in w.told_as("HostReplaced")] == (["c"] if trains else [])
        w.warm = {"a", "c"}
        w.settle()
        w.ends("b", 1, 1)
        w.settle()
        assert w.me(1).used == ("b",)  # nobody else trains


def test_of_several_replicas_each_takes_another_host_where_ranks_wait() -> None:
    w = World(*"abcde", each=1, replicas=3)
    w.contributed(2)
    w.warm = {"e"}
    w.report("e")
    w.cut = {"a", "b"}
    w.settle(EVICT_S + 1)
    assert sorted([w.me().used, w.me(1).used]) == [("d",), ("e",)]


@pytest.mark.parametrize("each", [1, 2])
def test_a_slow_replica_moves_to_a_spare_host_or_is_started_again_where_there_is_none(each: int) -> None:
    """Its ranks may know their host by another name than its agent."""
    w = World(*"abcdefg"[: 3 * each + 1], replicas=3, each=each)
    names = [w.me(n).incarnation for n in range(3)]
    members = tuple(Member(n, names[n], "contribute", hosts=ranges((f"node{n}",) * 2 * each)) for n in range(3))
    grant = Grant(1, 1, initial("c", "w"), members, 3, "")
    views = tuple(replace(view, incarnation=name) for view, name in zip(w.s.views, names, strict=True))
    w.s = replace(w.s, grant=grant, epoch=1, views=views)

    def planned(**changes: Any) -> Any:
        found = Culprit(1, "slow", 2, 1, "its rank 1 is slow", 1)
        return plan_culprit(w.s, found._replace(**changes), w.now, CULPRIT_S)

    assert [planned(rank=n).host for n in range(2 * each)] == [host for host in w.me(1).used for _ in range(2)]
    assert planned(rank=None).host == ("" if each > 1 else w.me(1).used[0])
    assert planned(kind="absent").host == ""
    assert isinstance(planned(witnesses=1), Impossible)
    (spare,) = w.has.keys() - {host for n in range(3) for host in w.me(n).used}
    w.lose(spare)
    assert (planned().due, planned().host) == (True, "")

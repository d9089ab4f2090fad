"""With which state the ranks of a replica come back, whatever of its copies is damaged or gone."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from torch.distributed.device_mesh import DeviceMesh

from ft_hsdp import fault_injection
from ft_hsdp.config import parse, public
from ft_hsdp.core.state_id import StateId
from ft_hsdp.state.agent.messages import Settle
from ft_hsdp.state.replica_group import ReplicaGroup
from ft_hsdp.train.state import checkpointing
from ft_hsdp.train.state.checkpointing import Checkpoints
from ft_hsdp.train.state.known_shards import Recoverer
from ft_hsdp.train.state.live_state import LiveState
from ft_hsdp.train.state.recovery import Restoration
from ft_hsdp.train.state.snapshots import SnapshotWriter
from tests.support.state.memory_of_hosts import (
    AGAINST,
    NBYTES,
    RANKS,
    AgentOfHost,
    Lighthouse,
    Restored,
    restored,
    state,
)
from tests.support.state.widths import TOKEN
from tests.support.waiting import until
from tests.train.state.test_live_state import hold
from tests.train.state.test_snapshots import DEADLINE_S, Place, walk
from tests.train.state.test_snapshots import place as place

ALONE = Recoverer(0, 1, "h0", TOKEN, lambda _: None, 0.0, 30.0)  # the lighthouse does not answer


def came_back(live: LiveState, writer: SnapshotWriter, place: Place) -> StateId | None:
    """The state of a fresh rank after it has restored."""
    checkpoints = Checkpoints(place.folder, "", 1, 1, (1, 1), None)
    Restoration(live, writer, ReplicaGroup(), checkpoints, True, place.journal, ALONE).run()
    return live.state


def flip(at: StateId) -> None:
    """Have the next snapshot of this state, or of a newer one, flip in the agent's memory."""
    failpoints = parse(
        {"debug": {"failpoints": {"snapshot-flip": {"replicas": [0], "step": at.step}}}}
    ).debug.failpoints
    fault_injection.arm(failpoints, 0, 0, 0)


def test_a_damaged_copy_is_passed_over(mesh: DeviceMesh, place: Place) -> None:
    live, sharded = hold(mesh)
    writer = place.writer(live)
    walk(live, sharded, writer, 2)
    older = live.state
    assert older is not None
    flip(replace(older, step=3))
    walk(live, sharded, writer, 1)
    fresh, _ = hold(mesh, seed=5)
    again = place.writer(fresh)
    assert came_back(fresh, again, place) == older
    assert "SnapshotCorrupt" in place.events()
    assert [kept.state for kept in again.list()] == [older]
    last, _ = hold(mesh, seed=6)
    flip(older)
    again.mark_current(older)  # another copy of what is held
    assert again.wait(DEADLINE_S)
    again.request(older, 60.0)  # a donor finds it, and makes one more
    settle = Settle(older, True)
    until(lambda: (again.order(settle), again.wait(DEADLINE_S), place.events().count("SnapshotCorrupt") == 2)[-1])
    again.close()
    final = place.writer(last)
    assert came_back(last, final, place) == older
    assert last.digest() == fresh.digest()


# The ranks of a replica together, with agents on several hosts.


@pytest.fixture
def hosts() -> Iterator[Callable[..., AgentOfHost]]:
    """Makes agents of hosts: (replica, host, rank, steps that it keeps)."""
    made: list[AgentOfHost] = []

    def make(replica: int, host: str, rank: int, *steps: int) -> AgentOfHost:
        made.append(AgentOfHost(replica, host, *((step, RANKS, rank) for step in steps)))
        return made[-1]

    yield make
    for agent in made:
        agent.close()


Make = Callable[..., AgentOfHost]


def told(found: Restored, **wanted: object) -> None:
    (row,) = found.events("StateRestored")
    assert {key: row[key] for key in wanted} == wanted


def test_what_the_own_agents_keep_is_taken_and_nobody_else_is_asked(hosts: Make, tmp_path: Path) -> None:
    own = [hosts(0, "r0h0", 0, 4, 5), hosts(0, "r0h1", 1, 4, 5)]
    other = hosts(1, "r1h0", 0, 5)
    found = restored(tmp_path, own, Lighthouse(5, [*own, other]))
    assert found.states == [state(5)] * 2
    told(found, rung="agent", origin="agent", bytes=0, lost_steps=0, ranks=2, number=1)
    told(found, **{"from": {"0": "r0h0", "1": "r0h1"}})
    assert other.asked == 0


def test_a_host_lost_in_each_replica_loses_nothing_if_they_held_different_shards(hosts, tmp_path) -> None:
    own = [hosts(0, "r0h0", 0), hosts(0, "r0h1", 1, 4, 5)]  # the first one is new
    others = [hosts(1, "r1h0", 0, 4, 5), hosts(1, "r1h1", 1, 4, 5)]
    others[1].close()
    found = restored(tmp_path, own, Lighthouse(5, [*own, *others]))
    assert found.states == [state(5)] * 2
    assert found.right, "the bytes are those of the state"
    told(found, rung="replica", lost_steps=0, **{"from": {"0": "r1h0", "1": "r0h1"}})
    assert found.events("StateRestored")[0]["bytes"] == NBYTES[0]
    assert own[0].keeps(5, RANKS, 0), "what was fetched is a snapshot at once"


def test_one_step_is_lost_if_its_shards_are_not_all_there(hosts: Make, tmp_path: Path) -> None:
    own = [hosts(0, "r0h0", 0), hosts(0, "r0h1", 1, 4, 5)]
    found = restored(tmp_path, own, Lighthouse(5, [*own, hosts(1, "r1h0", 0, 4)]))
    assert found.states == [state(4)] * 2
    told(found, rung="replica", lost_steps=1, step=4)


def test_shards_of_two_states_are_never_combined(hosts: Make, tmp_path: Path) -> None:
    own = [hosts(0, "r0h0", 0), hosts(0, "r0h1", 1, 5)]
    found = restored(tmp_path, own, Lighthouse(5, [*own, hosts(1, "r1h0", 0, 4)]))
    assert found.states == [AGAINST] * 2, "the checkpoint, on both"
    told(found, rung="checkpoint", lost_steps=3)


def test_without_another_source_all_ranks_take_the_older_state(hosts: Make, tmp_path: Path) -> None:
    own = [hosts(0, "r0h0", 0), hosts(0, "r0h1", 1, 4, 5)]
    bad = hosts(1, "r1h0", 0, 4, 5)
    bad.flip(5, RANKS, 0)
    found = restored(tmp_path, own, Lighthouse(5, [*own, bad]))
    assert (found.states, found.right) == ([state(4)] * 2, True), "the rank whose copy is whole, too"
    told(found, rung="replica", lost_steps=1)


def test_a_damaged_copy_in_the_own_agent_is_replaced_from_another_replica(hosts: Make, tmp_path: Path) -> None:
    own = [hosts(0, "r0h0", 0, 5), hosts(0, "r0h1", 1)]
    own[0].flip(5, RANKS, 0)
    others = [hosts(1, "r1h0", 0, 5), hosts(1, "r1h1", 1, 5)]
    found = restored(tmp_path, own, Lighthouse(5, [*own, *others]))
    assert (found.states, found.right) == ([state(5)] * 2, True)
    told(found, rung="replica", bytes=sum(NBYTES), **{"from": {"0": "r1h0", "1": "r0h1"}})
    assert own[1].keeps(5, RANKS, 1), "rank 1 has fetched it once, in the attempt that failed on rank 0"


def test_nothing_in_memory_leaves_the_checkpoint_the_same_on_all(hosts: Make, tmp_path: Path) -> None:
    own = [hosts(0, "r0h0", 0), hosts(0, "r0h1", 1)]
    other = hosts(1, "r1h0", 0, 4, 5)
    for rank, step in ((0, 4), (0, 5)):
        other.flip(step, RANKS, rank)
    found = restored(tmp_path, own, Lighthouse(5, [*own, other]))
    assert found.states == [AGAINST] * 2
    told(found, rung="checkpoint", lost_steps=3, bytes=sum(NBYTES))


@pytest.mark.parametrize("damaged", [(), (5,)])
def test_a_checkpoint_that_is_newer_than_what_is_in_memory_is_taken(hosts, tmp_path, damaged) -> None:
    """From the start, or after an attempt with a newer state has failed."""
    own = [hosts(0, "r0h0", 0, 1, *damaged), hosts(0, "r0h1", 1, 1, *damaged)]
    for step in damaged:
        own[0].flip(step, RANKS, 0)
    found = restored(tmp_path, own, Lighthouse(5, own), published=AGAINST)
    assert found.states == [AGAINST] * 2
    assert [row["rung"] for row in found.events("StateRestored")] == ["checkpoint"]


def test_a_checkpoint_that_is_older_is_not_read(hosts: Make, tmp_path: Path) -> None:
    own = [hosts(0, "r0h0", 0, 5), hosts(0, "r0h1", 1, 5)]
    found = restored(tmp_path, own, Lighthouse(6, own), published=AGAINST)
    assert found.states == [state(5)] * 2
    assert found.read == 0


def test_while_others_train_no_agent_of_another_replica_is_asked(hosts: Make, tmp_path: Path) -> None:
    own = [hosts(0, "r0h0", 0), hosts(0, "r0h1", 1, 5)]
    other = hosts(1, "r1h0", 0, 5)
    found = restored(tmp_path, own, Lighthouse(5, [*own, other], stands=[True] * 1000))
    assert found.states == [AGAINST] * 2, "where it begins to catch up does not matter"
    told(found, rung="checkpoint", lost_steps=0)
    assert other.asked == 0


def test_while_others_train_copies_on_the_own_hosts_are_found(hosts: Make, tmp_path: Path) -> None:
    own = [hosts(0, "r0h0", 0), hosts(0, "r0h1", 1, 5)]
    own[1].keep(5, RANKS, 0)
    found = restored(tmp_path, own, Lighthouse(5, own, stands=[True] * 1000))
    assert (found.states, found.right, found.read) == ([state(5)] * 2, True, 0), "no checkpoint is read"
    told(found, rung="copy", lost_steps=0)


def test_an_own_state_is_enough_while_others_train(hosts: Make, tmp_path: Path) -> None:
    own = [hosts(0, "r0h0", 0, 4), hosts(0, "r0h1", 1, 4, 5)]
    own[1].keep(5, RANKS, 0)
    found = restored(tmp_path, own, Lighthouse(6, own, stands=[True] * 1000))
    assert found.states == [state(4)] * 2, "it fetches a newer one in any case"
    assert [agent.asked for agent in own] == [0, 0]


def test_an_exit_that_is_reported_a_moment_late_is_waited_for(hosts: Make, tmp_path: Path) -> None:
    own = [hosts(0, "r0h0", 0), hosts(0, "r0h1", 1, 5)]
    found = restored(tmp_path, own, Lighthouse(5, [*own, hosts(1, "r1h0", 0, 5)], stands=[True, True, False]))
    assert found.states == [state(5)] * 2


@pytest.mark.parametrize("current", [True, False])
def test_without_a_lighthouse_the_own_agents_are_enough(hosts: Make, tmp_path: Path, current: bool) -> None:
    own = [hosts(0, "r0h0", 0, 4, 5), hosts(0, "r0h1", 1, 4)]
    found = restored(tmp_path, own, None, current=current)
    assert found.states == [state(4)] * 2
    told(found, rung="agent", lost_steps=None)


@pytest.mark.parametrize("current", [True, False])
def test_a_checkpoint_is_taken_if_the_agents_die_between_their_answers(hosts, tmp_path, current) -> None:
    own = [hosts(0, "r0h0", 0, 4, 5), hosts(0, "r0h1", 1, 4, 5)]
    own[1].forgets = True
    found = restored(tmp_path, own, None, current=current)
    assert found.states == [AGAINST] * 2
    assert found.read == 2, "once on each rank"


def test_after_the_limit_no_further_source_is_tried(hosts: Make, tmp_path: Path) -> None:
    own = [hosts(0, "r0h0", 0, 4, 5), hosts(0, "r0h1", 1, 4, 5)]
    assert restored(tmp_path, own, None, limit_s=0.0).states == [AGAINST] * 2


@pytest.mark.parametrize("number", [0, 1])
def test_a_restart_with_nothing_at_all_is_a_recovery_too(hosts: Make, tmp_path: Path, number: int) -> None:
    own = [hosts(0, "r0h0", 0), hosts(0, "r0h1", 1)]
    found = restored(tmp_path, own, Lighthouse(0, own), checkpoint=False, number=number)
    assert [row["rung"] for row in found.events("StateRestored")] == ["initial"] * number


def test_a_replica_that_fetches_from_those_that_train_has_lost_nothing(hosts: Make, tmp_path: Path) -> None:
    own = [hosts(0, "r0h0", 0), hosts(0, "r0h1", 1)]
    found = restored(tmp_path, own, Lighthouse(5, own, stands=(True,)), checkpoint=False, number=1)
    assert found.events("StateRestored") == []


def test_a_checkpoint_says_with_which_configuration_it_was_made_without_its_secrets(tmp_path: Path) -> None:
    config = parse({"replicas": 2, "alerts": [{"url": "https://a/hunter2"}]})
    with mock.patch.object(checkpointing, "Checkpointer") as made:
        checkpointing.open_checkpoints(config, tmp_path, "0-a-0", mock.Mock(), mock.Mock(rank=1), {})
    written = made.call_args.args[3].config
    assert "hunter2" not in str(written)
    assert parse(written) == public(config)

"""Replicas say on which hosts their ranks run; grants, the store, the journal and the status carry it."""

import asyncio
import json
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from ft_hsdp import protocol
from ft_hsdp.core.grant import Grant, ranges
from ft_hsdp.core.host_report import EndedRank, HostRanks, HostReport
from ft_hsdp.core.restart import RestartPolicy
from ft_hsdp.errors import EXIT_CONFIG
from ft_hsdp.protocol import ProcessReport
from lighthouse import service as services
from lighthouse.overview.replicas import Lanes
from lighthouse.placement.state import PlacementPolicy
from lighthouse.quorum.commands import Culprit
from lighthouse.store import StoreFailed
from tests.support.lighthouse.lighthouse_helpers import MemoryStore, ask, at, events, make_service, quiet
from tests.support.waiting import async_until

OWN = {0: (("a/1/n0", 1), ("a/1/n1", 2)), 1: (("n2", 3),)}


def said(replica: int, *place: Any, **fields: Any) -> Any:
    """What a replica of three ranks asks."""
    message = ask(replica, *place, **fields)
    return replace(message, ring=message.ring * 3, state=message.state * 3, hosts=OWN[replica])


async def test_the_agent_of_a_host_hears_that_the_script_is_to_blame() -> None:
    placing = PlacementPolicy(1, 1, RestartPolicy(1, 0.0))
    service, _ = make_service(total=1, placing=placing)
    report = HostReport("n0", "a", "here", 1, "127.0.0.1:4000")
    reply = await service.host(ProcessReport(host=report))
    ended = (HostRanks(reply.assigned[0].incarnation, ended=(EndedRank(0, EXIT_CONFIG),)),)
    report = replace(report, number=2, ranks=ended, seen=reply.seen)
    reply = await service.host(ProcessReport(host=report))
    assert (reply.assigned, bool(reply.halted), reply.wrong) == ((), True, True)


@mock.patch.multiple(services, STORE_RETRY_S=0.05, AGAIN_S=0.05)
@pytest.mark.parametrize("kind", ["absent", "slow"])
async def test_an_order_that_the_store_does_not_take_is_carried_out_once_it_does(kind: str) -> None:
    """One of the lighthouse itself; the operator hears at once that theirs was not taken."""
    store, placing = MemoryStore(), PlacementPolicy(1, 1, RestartPolicy(3, 0.0))
    service, rows = make_service(3, store, placing=placing, on_culprit="evict", on_straggler="demote")
    for name in ("n0", "n1", "n2", "spare"):
        await service.host(ProcessReport(host=HostReport(name, "a", "here", 1, "127.0.0.1:4000")))
    placed = service.state.placement.replicas
    names = [me.incarnation for me in placed]
    asks = [replace(ask(n), hosts=((me.used[0], 1),)) for n, me in enumerate(placed)]
    asks = [replace(each, report=replace(each.report, incarnation=names[n])) for n, each in enumerate(asks)]
    await asyncio.gather(*map(service.ask, asks))
    store.full = True
    with pytest.raises(StoreFailed):
        service.command("evict", 2, "it smokes", "here")
    service.suspect(Culprit(1, kind, 2, 1, "it hangs"))
    await quiet()
    assert service.state.placement.replicas == placed
    store.full = False
    await async_until(lambda: service.state.placement.replicas != placed or service.state.placement.cordoned)
    assert [host for host, _ in service.state.placement.cordoned] == ["n1"] * (kind == "slow")
    service.command("evict", 2, "it smokes", "here")
    ends = [me.incarnation for me in service.state.placement.replicas if me.phase == "ends"]
    assert ends == names[1 + (kind == "slow") :]
    assert [row["incarnation"] for row in events(rows, "ReplicaEvicted")] == ends
    service.close()


async def test_a_grant_names_the_hosts_of_each_member_and_the_journal_those_that_are_new() -> None:
    service, rows = make_service()
    first, other = await asyncio.gather(service.ask(said(0)), service.ask(said(1)))
    assert isinstance(first, Grant)
    assert first == other
    assert {m.replica: m.hosts for m in first.members} == OWN
    (granted,) = events(rows, "EpochGranted")
    assert json.loads(json.dumps(granted))["hosts"] == {"0": [["a/1/n0", 1], ["a/1/n1", 2]], "1": [["n2", 3]]}
    shown = service.status()["replicas"]
    assert [row["hosts"] for row in shown] == [
        [{"host": "a/1/n0", "ranks": [0]}, {"host": "a/1/n1", "ranks": [1, 2]}],
        [{"host": "n2", "ranks": [0, 1, 2]}],
    ]
    moved = (("a/1/n0", 1), ("a/2/n9", 2))
    again = await asyncio.gather(
        service.ask(replace(said(0, at(1, 1), after=1), hosts=moved)), service.ask(said(1, at(1, 1), after=1))
    )
    assert {m.replica: m.hosts for m in again[0].members} == {0: moved, 1: OWN[1]}
    assert events(rows, "EpochGranted")[1]["hosts"] == {"0": moved}, "replica 1 is where it was"


async def test_hosts_whose_ranks_alternate_are_named_once_all_the_way() -> None:
    """As when tasks are dealt out to nodes in turns: in the grant, the journal, the status and on the page."""
    turns = ranges(["n0", "n1", "n0"])
    service, rows = make_service(total=1)
    grant = await service.ask(replace(said(0), hosts=turns))
    assert isinstance(grant, Grant)
    travelled = protocol.decode(protocol.encode(grant), Grant)
    assert [m.hosts for m in travelled.members] == [turns]
    (granted,) = events(rows, "EpochGranted")
    told = json.loads(json.dumps(granted))["hosts"]
    assert told == {"0": [["n0", [[0, 1], [2, 1]]], ["n1", [[1, 1]]]]}
    assert service.status()["replicas"][0]["hosts"] == [
        {"host": "n0", "ranks": [0, 2]},
        {"host": "n1", "ranks": [1]},
    ]
    shown = Lanes(1, 3, 1)
    shown.event("EpochGranted", {"hosts": told})
    assert shown.all[0].hosts == [{"host": "n0", "ranks": 2}, {"host": "n1", "ranks": 1}]


async def test_a_host_with_another_configuration_is_refused_by_the_key_and_gets_no_ranks() -> None:
    """It would get a place, and its ranks would end the job as a wrong configuration does."""
    placing = PlacementPolicy(1, 1, RestartPolicy(3, 0.0))
    service, rows = make_service(config_hash="d" * 32, rules={"train.seed": "1"}, total=1, placing=placing)
    report = HostReport("near", "a", "here", 1, "127.0.0.1:1")
    reply = await service.host(ProcessReport(host=report, rules={"train.seed": "2"}))
    assert reply.refused.startswith("train.seed is 2 here, and 1 in the job")
    assert (reply.wrong, reply.assigned, service.hosts()) == (True, (), [])
    unfit = await service.host(ProcessReport(host=report, rules={"train.seed": "1"}, unfit="its disk lies"))
    assert (unfit.refused, unfit.wrong, unfit.assigned, service.hosts()) == ("its disk lies", False, (), [])
    refused = [(row["host"], row["reason"]) for row in events(rows, "AskRefused")]
    assert refused == [("near", reply.refused), ("near", unfit.refused)]
    reply = await service.host(ProcessReport(host=report, rules={"train.seed": "1"}))
    assert reply.refused == ""
    assert reply.assigned

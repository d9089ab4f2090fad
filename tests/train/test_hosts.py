import os
import socket

import pytest

from ft_hsdp.config import parse
from ft_hsdp.core.restart import IncarnationId
from ft_hsdp.launch.agent import agent_path
from ft_hsdp.train.identity import RankPlace, begin, host_name, host_path
from tests.support.refused import refused

HERE = {"FT_HSDP_HOST": "node7"}


@pytest.mark.parametrize(
    ("labels", "more", "path"),
    [
        ({}, {}, "node7"),
        ({"node[0-9]*": "a/7"}, {}, "a/7/node7"),
        ({"node[0-6]": "a/6", "*": "8"}, {}, "8/node7"),
        ({"Node7": "a/7"}, {}, "node7"),
        ({}, {"FT_HSDP_DOMAINS": "zone=a,rack=7"}, "a/7/node7"),
        ({}, {"FT_HSDP_DOMAINS": "rack=7,zone=a"}, "a/7/node7"),
        ({}, {"FT_HSDP_DOMAINS": "rack=7"}, "7/node7"),
        ({"*": "b"}, {"FT_HSDP_DOMAINS": "zone=a,rack=7"}, "b/node7"),
        ({}, {"SLURM_TOPOLOGY_ADDR": "s0.s2.node7"}, "s0/s2/node7"),
        ({}, {"SLURM_TOPOLOGY_ADDR": "s0.s1.s2.node7"}, "s0/s2/node7"),
        ({}, {"SLURM_TOPOLOGY_ADDR": "s2.node7"}, "s2/node7"),
        ({}, {"SLURM_TOPOLOGY_ADDR": "node7"}, "node7"),
        ({}, {"SLURM_TOPOLOGY_ADDR": "s[0-1].s2.node7"}, "s-0-1-/s2/node7"),
        ({}, {"FT_HSDP_DOMAINS": "zone=a"}, "a//node7"),
        ({}, {"FT_HSDP_DOMAINS": "zone=,rack="}, "node7"),
        ({"*": "a/"}, {}, "a//node7"),
        (
            {},
            {"SLURM_TOPOLOGY_ADDR": "s0.s2.node7", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"},
            "s0/s2/node7",
        ),
        ({}, {"SLURM_TOPOLOGY_ADDR": "s2.node7.x.org", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.node"}, "s2/node7"),
        ({}, {"SLURM_TOPOLOGY_ADDR": "node7.x.org", "SLURM_TOPOLOGY_ADDR_PATTERN": "node"}, "node7"),
        ({}, {"SLURM_TOPOLOGY_ADDR": "s0.s2.node7", "FT_HSDP_DOMAINS": "rack=9"}, "9/node7"),
    ],
)
def test_a_path_is_what_is_known_of_a_host(labels: dict[str, str], more: dict[str, str], path: str) -> None:
    assert host_path(labels, HERE | more) == path


def test_a_host_is_its_machine_unless_it_has_a_name_of_its_own() -> None:
    assert host_name({}) == socket.gethostname()
    assert host_name({"FT_HSDP_HOST": "a/strange name" + "e" * 100}) == ("a-strange-name" + "e" * 100)[:64]


@pytest.mark.parametrize(("labels", "where"), [({}, "s0/s2/"), ({"node7": "a/"}, "a//")])
def test_hosts_on_one_node_are_one_host_for_copies_and_each_has_its_agent(labels, where) -> None:
    told = {"FT_HSDP_NODE": "node7", "FT_HSDP_HOST": "node7-3", "SLURM_TOPOLOGY_ADDR": "s0.s2.node7"}
    config = parse({"hosts": {"labels": labels}})
    assert (host_path(labels, told), agent_path(config, told)) == (f"{where}node7", f"{where}node7-3")
    assert agent_path(config, told, 1) == f"{where}node7-3-r1"


@pytest.mark.parametrize(
    "said", ["zone", "a,7", "zone=a,rack=b/c", "rack=a,rack=b", "rack=a,,", "rack=a,host=b", "zone=a\nb"]
)
def test_domains_that_cannot_be_read_are_one_line(said: str) -> None:
    refused(
        lambda: host_path({}, HERE | {"FT_HSDP_DOMAINS": said}),
        r"FT_HSDP_DOMAINS: got .*allowed: zone=ZONE,rack=RACK or one of them",
    )


@pytest.mark.parametrize(
    ("address", "kinds", "key"),
    [
        ("node7", "switch.node", "SLURM_TOPOLOGY_ADDR"),
        ("s0.node7", "switch", "SLURM_TOPOLOGY_ADDR_PATTERN"),
        ("s0.node7", "node.switch", "SLURM_TOPOLOGY_ADDR_PATTERN"),
    ],
)
def test_a_topology_of_slurm_that_cannot_be_read_is_one_line(address: str, kinds: str, key: str) -> None:
    said = {"SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": kinds}
    refused(lambda: host_path({}, HERE | said), rf"^{key}: got .*else set FT_HSDP_DOMAINS")


@pytest.mark.parametrize(
    ("host", "log"), [("r0h1", "agent-r0h1.log"), (None, f"agent-{socket.gethostname()}.log")]
)
def test_the_agent_of_an_emulated_host_has_its_name(tmp_path, monkeypatch, host, log) -> None:
    monkeypatch.delenv("FT_HSDP_HOST", raising=False)
    if host is not None:
        monkeypatch.setenv("FT_HSDP_HOST", host)
    place = RankPlace(2, 4, tmp_path, ("http://127.0.0.1:1",), "t", "127.0.0.1", 0)
    config = parse({"ranks_per_replica": 4, "hosts": {"per_replica": 2, "labels": {"*": "7"}}})
    made = begin(config, place, IncarnationId(0, "a", 0))
    assert (made.host, made.shared) == (f"7/{host or socket.gethostname()}", host or "")
    starter = made.starter
    assert starter is not None
    for agent in starter.started:
        agent.kill()
        agent.wait()
    assert len(starter.started) == 1
    assert (starter.name, starter.log.name, starter.guard) == (host or "", log, os.getppid())

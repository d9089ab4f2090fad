from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from datetime import timedelta
from unittest import mock

import psutil
import pytest

from ft_hsdp.config import parse
from ft_hsdp.errors import Retryable
from ft_hsdp.launch.backend.processes import free_port
from ft_hsdp.train import join

BACKENDS = ("gloo", "cpu:gloo")  # the second stands for all that have torch's own store, such as a GPU's
RANKS = 2
LISTENS = """
import json, os, sys, psutil, torch.distributed as dist
from ft_hsdp.config import parse
from ft_hsdp.train import join
os.environ.pop("GLOO_SOCKET_IFNAME", None)
parts = [(backend, port, rank) for backend, port in json.loads(sys.argv[1]) for rank in range(int(sys.argv[2]))]
children = []
for backend, port, rank in parts:
    pid = os.fork()
    if pid == 0:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        store = join._connect_ranks(rank, int(sys.argv[2]), "0-a-0", backend, parse({}), "ab" * 32)
        dist.barrier()
        at = [c.laddr for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
        told, ips = os.environ.get("GLOO_SOCKET_IFNAME"), sorted({a.ip for a in at})
        said = [backend, rank, told, ips, port in {a.port for a in at}, store is not None]
        os.write(1, (json.dumps(said) + "\\n").encode())
        sys.exit()  # and nothing is closed
    children.append(pid)
sys.exit(any(os.waitpid(pid, 0)[1] for pid in children))
"""


def test_a_replica_listens_on_its_address_alone_and_its_store_no_more() -> None:
    """Torch's store would take every address and listen for good; gloo would take that of the host's name, which
    may be this one."""
    ports = json.dumps([(backend, free_port()) for backend in BACKENDS])
    command = [sys.executable, "-c", LISTENS, ports, str(RANKS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ}, check=False)
    said = sorted(json.loads(line) for line in done.stdout.splitlines())
    told = join._interface("127.0.0.1")
    torchs = [["cpu:gloo", rank, told, ["127.0.0.1"], rank == 0, False] for rank in range(RANKS)]
    ours = [["gloo", rank, told, ["127.0.0.1"], False, True] for rank in range(RANKS)]
    assert said == [*torchs, *ours], done.stderr
    assert done.returncode == 0, done.stderr
    assert "Task" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_rank_0_listens_at_its_address(host: str) -> None:
    with join._listener(host, 0) as sock:
        assert sock.getsockname()[0] == host


def test_a_name_may_mean_another_address_elsewhere() -> None:
    with join._listener("localhost", 0) as sock:
        assert sock.getsockname()[0] in ("::", "0.0.0.0")
        port = sock.getsockname()[1]
        for host in ("127.0.0.1", "127.0.0.2"):
            socket.create_connection((host, port), 5).close()


def test_an_address_that_is_taken_is_one_line() -> None:
    with join._listener("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(Retryable, match=rf"MASTER_ADDR:MASTER_PORT 127.0.0.1:{port}: Address already in use"):
            join._listener("127.0.0.1", port)


def test_the_interface_is_that_of_the_way_there() -> None:
    name = join._interface("127.0.0.1")
    assert name is not None
    assert "127.0.0.1" in {each.address for each in psutil.net_if_addrs()[name]}
    assert join._interface("no such host") is None


def test_ranks_that_do_not_meet_in_time_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would wait for 30 minutes, here and later in each collective."""
    named = {name: mock.Mock() for name in ("connect", "serve", "_set_pg_timeout")}
    torchs = {name: mock.Mock() for name in ("TCPStore", "PrefixStore", "init_process_group")}
    for where, mocks in ((join, named), (join.dist, torchs)):
        for name, stands_in in mocks.items():
            monkeypatch.setattr(where, name, stands_in)
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1"), ("GLOO_SOCKET_IFNAME", "lo")):
        monkeypatch.setenv(name, value)
    for ftar_s, at_most_s in ((5, 30), (20, 40)):
        config = parse({"timeouts": {"ranks_s": 30}, "ftar": {"timeout_s": ftar_s}, "ranks_per_replica": 2})
        join._connect_ranks(1, 2, "0-a-0", "gloo", config, "token")
        join._connect_ranks(0, 1, "0-a-0", "gloo", config, "token")
        join._connect_ranks(1, 2, "0-a-0", "nccl", config, "token")
        assert named["connect"].call_args.args[-1] == named["serve"].call_args.args[-1] == 30.0
        assert torchs["TCPStore"].call_args.args[-1] == timedelta(seconds=30)
        assert torchs["init_process_group"].call_args.kwargs["timeout"] == timedelta(seconds=30)
        assert named["_set_pg_timeout"].call_args.args[0] == timedelta(seconds=at_most_s)

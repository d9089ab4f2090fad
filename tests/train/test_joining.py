from __future__ import annotations

import os
import socket
import subprocess
import sys

import psutil
import pytest

from ft_hsdp.launch.processes import free_port
from ft_hsdp.train import joining

LISTENS = """
import os, sys, psutil, torch.distributed as dist
from ft_hsdp.config import parse
from ft_hsdp.train import joining
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[1], "RANK": "0", "WORLD_SIZE": "1"}
os.environ.pop("GLOO_SOCKET_IFNAME", None)
joining._connect_ranks(0, 1, "0-a-0", "gloo", parse({}))
dist.barrier()
print(os.environ.get("GLOO_SOCKET_IFNAME"))
print(*{c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN})
"""


@pytest.mark.multiproc
def test_torchs_store_and_gloo_listen_on_the_replicas_address_alone() -> None:
    """Torch's store would take every address, gloo the one that the host's name has, perhaps this one."""
    command = [sys.executable, "-c", LISTENS, str(free_port())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ}, check=False)
    assert done.stdout.split() == [joining._interface("127.0.0.1"), "127.0.0.1"], done.stderr


def test_a_name_is_left_to_torch() -> None:
    assert joining._listener("localhost", 0) is None
    fd = joining._listener("127.0.0.1", 0)
    assert fd is not None
    with socket.socket(fileno=fd) as sock:
        assert sock.getsockname()[0] == "127.0.0.1"


def test_the_interface_is_that_of_the_way_there() -> None:
    name = joining._interface("127.0.0.1")
    assert name is not None
    assert "127.0.0.1" in {each.address for each in psutil.net_if_addrs()[name]}
    assert joining._interface("no such host") is None

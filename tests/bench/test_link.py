from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import link, namespaces
from benchmarks.link import LinkSetup, StepBlock, report
from benchmarks.namespaces import BRIDGE, INTERFACE, Network
from ft_hsdp.bench.results import ProgressLog
from ft_hsdp.errors import Retryable
from ft_hsdp.launch.backend.processes import environment
from tests.support.machines import within

needs_root = pytest.mark.skipif(bool(namespaces.unfit()), reason=namespaces.unfit() or "it can be made")
SPACES = Path("/run/netns")
PIECE = 50_000


def left(pid: int) -> list[str]:
    """Namespaces of the bench that is process `pid`."""
    return sorted(path.name for path in SPACES.glob(f"ft-hsdp-{pid}-*"))


def transfer(source: str, target: str, host: str, nbytes: int) -> None:
    """Send bytes over TCP from one namespace to another, which is at `host`."""
    with within(target, lambda: socket.create_server((host, 4000))) as server:
        client = within(source, lambda: socket.create_connection((host, 4000), 30))
        taker = server.accept()[0]
    for _ in range(nbytes // PIECE):  # as much as has room on the way
        client.sendall(bytes(PIECE))
        assert len(taker.recv(PIECE, socket.MSG_WAITALL)) == PIECE
    client.close()
    taker.close()


def blocks(*seconds: float, sent: float = 0.0) -> list[StepBlock]:
    return [StepBlock(each, sent, 2 * each) for each in seconds]


def commit(ftar_s: float, ftar: float, agreed: float, nbytes: int = 4_000_000) -> dict[str, Any]:
    return {"ftar_s": ftar_s, "ftar_bytes": nbytes, "waits": {"ftar": ftar, "commit": agreed}}


def test_costs_are_medians_beyond_those_of_replicas_that_train_alone() -> None:
    crews = {
        "alone": blocks(1.0, 9.0, 1.1),
        "hsdp": blocks(1.5, 1.6, 99.0, sent=8e6),
        "ft_hsdp": blocks(1.3, 1.2, 1.1, sent=8.5e6),
    }
    commits = [[commit(0.1, 0.0, 0.01), commit(0.2, 0.02, 0.02)], [commit(0.3, 0.04, 0.03)]]
    row = report(LinkSetup(rounds=3, bits_per_s=1e9), crews, commits)
    assert row["crews"]["alone"]["step"] == {"p50_ms": 1100.0, "min_ms": 1000.0, "max_ms": 9000.0, "count": 3}
    assert row["crews"]["ft_hsdp"]["cpu_ms_per_step"] == 2400.0
    assert row["crews"]["ft_hsdp"]["link_bytes_per_step"] == 8_500_000
    assert row["cost_ms"] == {"hsdp": 500.0, "ft_hsdp": 100.0}
    assert row["times_cost"] == 0.2
    assert row["gradient_bytes_per_rank"] == 3_000_000  # each rank sends 4/3 of its gradient
    assert row["least_exchange_ms"] == 64.0  # 2 ranks share the link: 8 MB at 1 Gbit/s
    assert row["ft_hsdp"] == {"exchange_ms": 200.0, "exposed_ms": 20.0, "commit_ms": 20.0, "mbit_per_s": 320.0}


def test_without_root_the_measure_is_left_out_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "RIGHTS", {"CAP_THAT_NOBODY_HAS": 63})
    stream = io.StringIO()
    log = ProgressLog(stream)
    assert link.measure(LinkSetup(), log) == []
    (line,) = stream.getvalue().splitlines()
    assert "CAP_THAT_NOBODY_HAS" in line
    assert log.notes == [line.removeprefix("note: ")]


@needs_root
@pytest.mark.multiproc
def test_what_goes_between_replicas_goes_over_links_that_are_slow_both_ways() -> None:
    with Network(2, "1gbit", "reno") as net:
        assert left(os.getpid()) == sorted([*net.replicas, net.hub])
        places = {(net.hub, "port0"), (net.hub, "port1"), *((space, INTERFACE) for space in net.replicas)}
        for space, device in places:
            found = json.loads(subprocess.check_output(["tc", "-n", space, "-j", "qdisc", "show", "dev", device]))
            assert [qdisc["kind"] for qdisc in found] == ["tbf"]
            assert found[0]["options"]["rate"] == 125_000_000
        setting = ["ip", "netns", "exec", net.replicas[1], "cat", "/proc/sys/net/ipv4/tcp_congestion_control"]
        assert subprocess.check_output(setting, text=True) == "reno\n"
        first, second = net.replicas
        before = net.sent()
        transfer(first, second, net.host(1), 3_000_000)
        between = net.sent()
        assert 3_000_000 < between[0] - before[0] < 3_500_000
        assert between[1] - before[1] < 500_000
        transfer(second, second, net.host(1), 3_000_000)
        assert net.sent()[1] - between[1] < 500_000
        down = subprocess.check_output(["ip", "-n", net.hub, "-j", "link", "show", "dev", BRIDGE])
        assert "UP" in json.loads(down)[0]["flags"]
    assert left(os.getpid()) == []


@needs_root
def test_nothing_is_left_where_it_cannot_be_made() -> None:
    with pytest.raises(Retryable, match=r"^bench: tc .* rate fast .*$") as caught, Network(2, "fast"):
        pass
    assert "\n" not in str(caught.value)
    assert left(os.getpid()) == []


@needs_root
@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("number", "code"),
    [pytest.param(signal.SIGINT, -signal.SIGINT, marks=pytest.mark.proof), (signal.SIGTERM, 143)],
)
def test_nothing_is_left_after_a_signal(number: int, code: int, tmp_path: Path) -> None:
    program = (
        "import sys; from benchmarks.link import LinkSetup, measure;"
        "from ft_hsdp.bench.results import ProgressLog; measure(LinkSetup(), ProgressLog(sys.stderr))"
    )
    command = [sys.executable, "-c", program]
    env = {**environment(), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL) as bench:
        try:
            inside = all_started(bench)
            assert len(left(bench.pid)) == 4
            bench.send_signal(number)
            assert bench.wait(timeout=30) == code
        finally:
            bench.terminate()
    assert left(bench.pid) == []
    assert [pid for pid in inside if Path(f"/proc/{pid}").exists()] == []
    assert list(tmp_path.iterdir()) == []


def all_started(bench: subprocess.Popen[bytes]) -> list[str]:
    """Every rank and the lighthouse, once they are in their namespaces."""
    deadline = time.monotonic() + 60
    while len(inside := [pid for space in left(bench.pid) for pid in processes(space)]) < 3 * 3 * 2 + 1:
        assert bench.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return inside


def processes(space: str) -> list[str]:
    """Process ids in a namespace."""
    command = ["ip", "netns", "pids", space]  # fails where the namespace is only half there
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout.split()

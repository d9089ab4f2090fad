import json
import os
import signal
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ft_hsdp.config import Config, parse
from ft_hsdp.core.restart import IncarnationId
from ft_hsdp.errors import ConfigError, LighthouseUnreachable, Retryable
from ft_hsdp.launch.backend.processes import free_port
from ft_hsdp.train import join
from ft_hsdp.train.identity import leaving_on_signals
from tests.support.refused import refused

CPU = torch.device("cpu")
BACKENDS = ("gloo", "cpu:gloo")  # the second stands for all that have torch's own store, such as a GPU's
RANKS = 2
LISTENS = """
import json, os, sys, psutil, torch, torch.distributed as dist
from ft_hsdp.config import parse
from ft_hsdp.train import join
os.environ.pop("GLOO_SOCKET_IFNAME", None)
parts = [(backend, port, rank) for backend, port in json.loads(sys.argv[1]) for rank in range(int(sys.argv[2]))]
children = []
for backend, port, rank in parts:
    pid = os.fork()
    if pid == 0:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        place = (rank, int(sys.argv[2]), "0-a-0", backend)
        store = join._connect_ranks(*place, parse({}), "ab" * 32, torch.device("cpu"))
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
    told = next(n for n, each in psutil.net_if_addrs().items() if "127.0.0.1" in {a.address for a in each})
    torchs = [["cpu:gloo", rank, told, ["127.0.0.1"], rank == 0, False] for rank in range(RANKS)]
    ours = [["gloo", rank, told, ["127.0.0.1"], False, True] for rank in range(RANKS)]
    assert said == [*torchs, *ours], done.stderr
    assert done.returncode == 0, done.stderr
    assert "Task" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("host", "listens"), [("127.0.0.1", ["127.0.0.1"]), ("::1", ["::1"]), ("localhost", ["::", "0.0.0.0"])]
)
def test_rank_0_listens_at_its_address_and_everywhere_if_it_has_a_name(host: str, listens: list[str]) -> None:
    """A name may mean another address elsewhere. An address that is taken is one line."""
    listen = join._listener
    with listen(host, 0) as sock:
        at, port = sock.getsockname()[:2]
        assert at in listens
        with pytest.raises(Retryable, match=f"{port}: Address already in use"):
            listen(host, port)


def test_ranks_that_do_not_meet_in_time_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would wait for 30 minutes, here and later in each collective."""
    named = {name: mock.Mock() for name in ("connect", "serve", "_set_pg_timeout")}
    torchs = {name: mock.Mock() for name in ("TCPStore", "PrefixStore", "init_process_group")}
    for where, mocks in ((join, named), (join.dist, torchs)):
        for name, stands_in in mocks.items():
            monkeypatch.setattr(where, name, stands_in)
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1"), ("GLOO_SOCKET_IFNAME", "lo")):
        monkeypatch.setenv(name, value)
    for ftar_s, pause_s, at_most_s in ((5, 1, 30), (20, 1, 40), (20, 90, 90)):
        waits = {"ranks_s": 30, "pause_s": pause_s}
        config = parse({"timeouts": waits, "ftar": {"timeout_s": ftar_s}, "ranks_per_replica": 2})
        join._connect_ranks(1, 2, "0-a-0", "gloo", config, "token", CPU)
        join._connect_ranks(0, 1, "0-a-0", "gloo", config, "token", CPU)
        join._connect_ranks(1, 2, "0-a-0", "nccl", config, "token", torch.device("cuda", 1))
        assert named["connect"].call_args.args[-1] == named["serve"].call_args.args[-1] == 30.0
        assert torchs["TCPStore"].call_args.args[-1] == timedelta(seconds=30)
        named_device = [call.kwargs.get("device_id") for call in torchs["init_process_group"].call_args_list[-3:]]
        assert named_device == [None, None, torch.device("cuda", 1)]
        assert torchs["init_process_group"].call_args.kwargs["timeout"] == timedelta(seconds=30)
        assert named["_set_pg_timeout"].call_args.args[0] == timedelta(seconds=at_most_s)


class Spare:
    """A process that has not been assigned to a replica."""

    def poll(self) -> None:
        return None

    def wait(self) -> IncarnationId:
        raise AssertionError("nobody asks for it")


@pytest.fixture
def config() -> Config:
    return parse({"replicas": 2, "ranks_per_replica": 1, "timeouts": {"reach_s": 5}})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("ab" * 32)
    (tmp_path / "lighthouse.json").write_text('{"url": "http://127.0.0.1:1"}')
    return tmp_path


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that no launcher has started, and that has not joined."""
    monkeypatch.setattr(join, "_process", join._Process())
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "FT_HSDP_CONFIG", "FT_HSDP_REPLICA", "FT_HSDP_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def test_a_process_group_that_exists_is_used_and_stays(mesh: DeviceMesh, config: Config, run: Path) -> None:
    assert mesh.size() == 1
    job = join.join(config, Spare(), run)
    assert (job.rank, job.ranks, job.config) == (0, 1, config)
    refused(lambda: join.join(config, Spare(), run), "one: this process is a rank of its replica already")
    job.close()
    assert dist.is_initialized()
    join.join(config, Spare(), run).close()


def test_a_process_group_of_other_ranks_is_refused(mesh: DeviceMesh, run: Path) -> None:
    assert mesh.size() == 1
    two = parse({"ranks_per_replica": 2})
    with pytest.raises(ConfigError, match=r"process group's size: got 1; allowed: ranks_per_replica, which is 2"):
        join.join(two, Spare(), run)


def test_it_waits_for_the_lighthouse(mesh: DeviceMesh, config: Config, run: Path) -> None:
    assert mesh.size() == 1
    file = run / "lighthouse.json"
    written = file.read_text()
    file.write_text("{")  # it is being written
    timer = threading.Timer(0.3, file.write_text, [written])
    timer.start()
    join.join(config, Spare(), run).close()
    timer.join()


def test_a_run_without_a_lighthouse_is_one_line(config: Config, tmp_path: Path) -> None:
    short = config.model_copy(update={"timeouts": config.timeouts.model_copy(update={"reach_s": 0.2})})
    with pytest.raises(
        LighthouseUnreachable, match=r"no lighthouse within 0.2 s: no .*start `ft-hsdp lighthouse`"
    ):
        join.join(short, 0, tmp_path)


def test_what_is_missing_is_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(join.join, r"in FT_HSDP_CONFIG, or this script as `entry` of one")
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    (run / "c.yaml").write_text(f"job: {{name: {run.name}, runs_dir: {run.parent}}}\nreplicas: 2\n")
    monkeypatch.setenv("FT_HSDP_CONFIG", str(run / "c.yaml"))
    refused(join.join, r"0 to 1 .*as an argument or in FT_HSDP_REPLICA")
    monkeypatch.setenv("FT_HSDP_REPLICA", "2")
    refused(join.join, r"replica: got 2; allowed: 0 to 1")
    monkeypatch.setenv("FT_HSDP_REPLICA", "1")
    refused(join.join, "RANK: got None; allowed: a process that torchrun, or a launcher of ft_")


def test_sigterm_means_leave_while_the_process_is_a_member() -> None:
    left: list[str] = []
    with leaving_on_signals(lambda: left.append("one")) as told:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    assert (left, told) == (["one", "one"], [signal.SIGTERM] * 2)
    assert callable(signal.getsignal(signal.SIGTERM)), "schedulers repeat the signal"
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with leaving_on_signals(lambda: None):
        assert callable(signal.getsignal(signal.SIGTERM))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_programs_own_handler_of_sigterm_stays() -> None:
    own: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: own.append(number))
    try:
        with leaving_on_signals(lambda: own.append(0)) as told:
            signal.raise_signal(signal.SIGTERM)
        assert (own, told) == ([signal.SIGTERM], [])
    finally:
        signal.signal(signal.SIGTERM, before)

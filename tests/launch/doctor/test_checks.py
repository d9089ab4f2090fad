"""Each check by itself: what it takes for well, and what it says where that is not so."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ft_hsdp.config import Config, parse
from ft_hsdp.errors import ConfigError
from ft_hsdp.launch.doctor import CHECKS, Bad, Subject, Undecided, checks, gpu, network, result, storage
from ft_hsdp.launch.doctor import host as host_checks
from ft_hsdp.launch.doctor import ray as ray_checks
from ft_hsdp.launch.doctor.host import Allowance, allowance
from ft_hsdp.launch.ray.placement import request
from ft_hsdp.mounts import mount_of
from ft_hsdp.train import tokens
from tests.support.etcd_server import EtcdServer

ALONE = Subject(Config())
SPANNING = Subject(parse({"network": {"host": "0.0.0.0"}}))
GIB = 2**30


# Who is asked.


@pytest.mark.parametrize(
    ("subject", "spans", "replicas"),
    [
        (ALONE, False, 3),
        (SPANNING, True, 3),
        (Subject(parse({"network": {"host": "localhost"}})), False, 3),
        (Subject(Config(), ("http://127.0.0.1:1",)), False, 1),
        (Subject(Config(), ("http://head:1", "http://[::1]:1")), True, 1),
        (Subject(Config(), ray=True), False, 1),
        (Subject(Config(), ray_address="10.0.0.1:6379"), True, 1),
        (Subject(Config(), ray_address="ray://127.0.0.1:10001"), False, 1),
        (Subject(Config(), ray_address="auto"), False, 1),
    ],
)
def test_who_spans_machines_and_what_runs_here(subject: Subject, spans: bool, replicas: int) -> None:
    assert (subject.spans, subject.replicas) == (spans, replicas)


# Names, with this machine's real resolver.


@pytest.mark.parametrize(
    ("name", "alone", "spanning"),
    [
        ("localhost", "localhost is ", r"other machines would connect to themselves; .*Debian writes 127.0.1.1"),
        ("no-such-host.invalid", "a job on one machine needs none", r"has no address .*; add one to /etc/hosts"),
    ],
)
def test_a_name_that_others_cannot_use_matters_to_a_job_on_several_machines_only(
    monkeypatch: pytest.MonkeyPatch, name: str, alone: str, spanning: str
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    assert alone in network.hostname(ALONE)
    with pytest.raises(Bad, match=spanning):
        network.hostname(SPANNING)


@pytest.mark.parametrize(
    ("address", "back", "said"),
    [
        ("127.0.0.5", ["vm.example", "vm"], "vm is 127.0.0.5, and 127.0.0.5 is vm"),
        ("127.0.0.5", ["other"], "vm is 127.0.0.5, but 127.0.0.5 is other, which only affects logs"),
        ("127.0.0.5", [], "127.0.0.5 has no name"),
        ("192.0.2.77", ["vm"], "no address of this machine; a job on one machine does not need it"),
    ],
)
def test_a_name_leads_there_and_back(
    monkeypatch: pytest.MonkeyPatch, address: str, back: list[str], said: str
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "vm")
    monkeypatch.setattr(network, "addresses", lambda _: [address])
    monkeypatch.setattr(network, "names_of", lambda _: back)
    assert said in network.hostname(ALONE)
    if address.startswith("192"):
        with pytest.raises(Bad, match=r"correct /etc/hosts"):
            network.hostname(SPANNING)


@pytest.mark.parametrize(
    ("host", "lighthouses", "said"),
    [
        ("no-such-host.invalid", (), "has no address"),
        ("192.0.2.77", (), "no address of this machine"),
        ("127.0.0.1", ("http://10.0.0.1:1",), "other machines cannot reach it"),
        ("localhost", ("http://10.0.0.1:1",), "other machines cannot reach it"),
    ],
)
def test_an_address_that_nobody_can_reach(host: str, lighthouses: tuple[str, ...], said: str) -> None:
    with pytest.raises(Bad, match=said):
        network.host(Subject(parse({"network": {"host": host}}), lighthouses))


def test_addresses_of_this_machine() -> None:
    assert network.host(SPANNING) == "0.0.0.0: all addresses of this machine"
    assert network.host(ALONE) == "127.0.0.1, an address of this machine; other machines cannot reach it"


# Ports.


def test_ports_that_are_free_and_taken() -> None:
    assert network.port(ALONE) == "127.0.0.1, any free port"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"network.port: got {number}"):
            network.port(Subject(parse({"network": {"port": number}})))
    for _ in range(50):  # whatever else runs here may take one of two neighbouring ports in between
        with socket.create_server(("127.0.0.1", 0)) as free:
            number = free.getsockname()[1]
        several = {"network": {"port": number}, "lighthouse": {"count": 2, "etcd": ["http://e"]}}
        with contextlib.suppress(ConfigError):
            assert network.port(Subject(parse(several))) == f"127.0.0.1:{number} to {number + 1} are free"
            return
    pytest.fail("no two neighbouring ports are ever free")


def test_as_many_sockets_as_the_job_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert network.sockets(ALONE).startswith("28 sockets will listen, opened 28; they share ports ")
    monkeypatch.setattr(network, "local_range", lambda: (40000, 40050))
    with pytest.raises(
        Bad, match=r"28 sockets will listen, but they share ports 40000 to 40050 .*ip_local_port_range"
    ):
        network.sockets(ALONE)
    monkeypatch.undo()
    with pytest.raises(Undecided, match=r"does not give the range of ports"):
        network.local_range(tmp_path / "none")


def test_states_are_served_where_somebody_can_connect() -> None:
    assert network.interface(ALONE) == "network.host 127.0.0.1: states are served at 127.0.0.1"
    other = parse({"network": {"state_interface": "127.0.0.7"}})
    assert network.interface(Subject(other)) == "network.state_interface 127.0.0.7: states are served at 127.0.0.7"
    with pytest.raises(Bad, match=r"a connection to 192.0.2.77 fails"):
        network.interface(Subject(parse({"network": {"state_interface": "192.0.2.77"}})))


# The clock.


def test_a_clock_that_nobody_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    assert network.synchronized() in (True, False)  # whatever this machine says, it can be asked
    monkeypatch.setattr(network, "synchronized", lambda: False)
    assert "a job on one machine does not need it" in network.clock(ALONE)
    with pytest.raises(Undecided, match=r"compare it with --lighthouse URL"):
        network.clock(SPANNING)
    monkeypatch.setattr(network, "synchronized", lambda: True)
    assert network.clock(SPANNING) == "the kernel reports it as synchronized"


# Control groups, on trees as the kernel shows them.


def tree(folder: Path, files: Mapping[str, str]) -> tuple[Path, Path]:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder / "cgroup", folder / "fs"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cgroup": "0::/\n"}, Allowance()),
        (
            {
                "cgroup": "0::/pod/box\n",
                "fs/pod/memory.max": f"{4 * GIB}\n",
                "fs/pod/memory.current": f"{3 * GIB}\n",
                "fs/pod/memory.stat": f"anon 1\ninactive_file {GIB}\n",
                "fs/pod/cpu.max": "150000 100000\n",
                "fs/pod/box/memory.max": "max\n",
                "fs/pod/box/cpu.max": "max 100000\n",
                "fs/pod/box/pids.max": "100\n",
                "fs/pod/box/pids.current": "30\n",
            },
            Allowance(2 * GIB, 1.5, 70),
        ),
        (  # a container that sees its own as the top, named by its host's path
            {"cgroup": "0::/../../docker/abc\n", "fs/memory.max": f"{GIB}\n", "fs/memory.current": f"{2 * GIB}\n"},
            Allowance(0),
        ),
        (
            {
                "cgroup": "4:memory:/box\n3:cpu,cpuacct:/box\n2:pids:/\n0::/\n",
                "fs/memory/memory.limit_in_bytes": f"{2**63 - 4096}\n",
                "fs/memory/box/memory.limit_in_bytes": f"{8 * GIB}\n",
                "fs/memory/box/memory.usage_in_bytes": f"{2 * GIB}\n",
                "fs/memory/box/memory.stat": "total_inactive_file 0\n",
                "fs/cpu/box/cpu.cfs_quota_us": "50000\n",
                "fs/cpu/box/cpu.cfs_period_us": "100000\n",
                "fs/cpu/cpu.cfs_quota_us": "-1\n",
                "fs/cpu/cpu.cfs_period_us": "100000\n",
                "fs/pids/pids.max": "max\n",
            },
            Allowance(6 * GIB, 0.5, None),
        ),
    ],
    ids=["none", "version 2", "own namespace", "version 1"],
)
def test_the_tightest_limit_of_a_container(tmp_path: Path, files: dict[str, str], expected: Allowance) -> None:
    assert allowance(*tree(tmp_path, files)) == expected


def test_a_machine_without_control_groups_has_no_limits(tmp_path: Path) -> None:
    assert allowance(tmp_path / "none", tmp_path) == Allowance()


# Memory, processors, files, threads.


def test_memory_of_ranks_spares_and_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_checks, "allowance", lambda: Allowance(64 * GIB))
    small, spared = Config(), parse({"spares": 4})
    assert host_checks.needed(spared, 3) - host_checks.needed(small, 3) > 4 * host_checks.RANK_BYTES
    assert host_checks.needed(small, 3) > host_checks.needed(small, 1)
    assert "and 4 spares" in host_checks.memory(Subject(spared))
    monkeypatch.setattr(host_checks, "allowance", lambda: Allowance(GIB))
    with pytest.raises(Bad, match=r"this container's limit leaves 1.0 GiB free; use fewer"):
        host_checks.memory(ALONE)


ONE_REPLICA = {"replicas": 1, "ranks_per_replica": 2, "hosts": {"per_replica": 2}}


def test_memory_of_the_copies_that_hosts_keep_for_each_other() -> None:
    apart, alone = parse(ONE_REPLICA), parse({**ONE_REPLICA, "hosts": {}})
    state = 3 * host_checks.weights(apart)
    more = host_checks.needed(apart, 1) - host_checks.needed(alone, 1)
    assert more == pytest.approx(2 * state + host_checks.AGENT_BYTES, rel=1e-6)
    assert ", 63.1 MiB of it copies for other hosts; " in host_checks.memory(Subject(apart))


def test_which_copies_a_job_will_have() -> None:
    assert host_checks.copies(ALONE) == (
        "2 copies of each shard, each on another host: healthy replicas are the copies"
    )
    found = host_checks.copies(Subject(parse(ONE_REPLICA)))
    assert found == "2 copies of each shard, each on another host: 63.1 MiB for other hosts"
    found = host_checks.copies(Subject(parse({**ONE_REPLICA, "entry": "train.py"})))
    assert found == "2 copies of each shard, each on another host: hosts keep copies for each other"
    found = host_checks.copies(Subject(parse({"replicas": 1})))
    assert found == "a lost host may take the state with it: there is one host only: no copy can be apart"
    with pytest.raises(Undecided, match=r"on how many hosts a replica runs is not known here; see"):
        host_checks.copies(SPANNING)
    with pytest.raises(Undecided, match=r"2 copies on different zones; no zone is known here, see domains"):
        host_checks.copies(Subject(parse({"memory": {"apart": "zone"}, "hosts": {"labels": {"r0h0": "rack-7"}}})))


def test_copies_that_cannot_be_kept_are_one_check_and_memory_another() -> None:
    job = Subject(parse({**ONE_REPLICA, "memory": {"copies": 3}}))
    with pytest.raises(Bad, match=r"^memory.copies: got 3; allowed: at most 2 here"):
        host_checks.copies(job)
    found = host_checks.memory(job)
    assert re.match(
        r"about .* GiB for .* x 1, without the copies that cannot be kept \(see copies\); .* free$", found
    )


def test_memory_can_be_sealed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_checks.memfd(ALONE) == "memory can be created, sealed and mapped"

    def refuse(*_: Any) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(Bad, match=r"memfd_create\(2\) with seals does not work \(Operation not permitted\)"):
        host_checks.memfd(ALONE)


def test_shared_memory_matters_to_nccl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpus = Subject(parse({"train": {"device": "cuda"}}))
    monkeypatch.setattr(host_checks, "SHM", tmp_path)
    assert host_checks.shm(ALONE).endswith("this job does not need it")
    monkeypatch.setattr(host_checks, "NCCL_BYTES", 2**60)
    with pytest.raises(Bad, match=r"NCCL needs about .*--shm-size"):
        host_checks.shm(gpus)
    monkeypatch.setattr(host_checks, "SHM", tmp_path / "none")
    assert host_checks.shm(ALONE).endswith("none, and this job does not need it")
    with pytest.raises(Bad, match=r"mount a tmpfs there"):
        host_checks.shm(gpus)


@pytest.mark.parametrize(
    ("labels", "domains", "said"),
    [
        (
            {},
            "",
            "the zone and rack of node7 are not known, so it counts as one of its own; hosts.labels or FT_HSDP_",
        ),
        (
            {"*": "7"},
            "",
            "7/node7, says hosts.labels; the zone of node7 is not known, so it counts as one of its own",
        ),
        (
            {"*": "a/"},
            "",
            "a//node7, says hosts.labels; the rack of node7 is not known, so it counts as one of its",
        ),
        ({}, "zone=a,rack=7", "node7 stands in rack 7 of zone a, says FT_HSDP_DOMAINS"),
    ],
)
def test_where_this_machine_stands(
    monkeypatch: pytest.MonkeyPatch, labels: dict[str, str], domains: str, said: str
) -> None:
    monkeypatch.setenv("FT_HSDP_HOST", "node7")
    monkeypatch.setenv("FT_HSDP_DOMAINS", domains)
    for variable in ("SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN"):
        monkeypatch.delenv(variable, raising=False)
    assert host_checks.domains(Subject(parse({"hosts": {"labels": labels}}))).startswith(said)


def test_processors_of_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_checks, "allowance", lambda: Allowance(cpus=0.5))
    said = "0.5 processors by this container's limit; 6 ranks share them, which is slow and changes no result"
    assert host_checks.cpus(ALONE) == said


def test_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
    try:
        with pytest.raises(
            Bad, match=r"256 open files are allowed per process, 320 are needed; run `ulimit -n 320`"
        ):
            host_checks.files(ALONE)
        assert host_checks.files(Subject(parse({"replicas": 2}))) == "256 open files are allowed per process"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_checks, "allowance", lambda: Allowance(threads=100))
    with pytest.raises(Bad, match=r"about 160 threads are needed, this container may start 100 more"):
        host_checks.processes(ALONE)
    assert host_checks.processes(Subject(Config(), ray=True)).startswith("about 80 threads; ")
    monkeypatch.setattr(host_checks, "allowance", lambda: Allowance())
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (10, 10))
    with pytest.raises(Bad, match=r"this user may start \d more"):
        host_checks.processes(ALONE)


def test_memory_that_rdma_pins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpus = Subject(parse({"train": {"device": "cuda"}}))
    monkeypatch.setattr(host_checks, "RDMA", tmp_path / "none")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (GIB, GIB))
    assert host_checks.memlock(gpus) == "1.0 GiB may be pinned; there is no RDMA card"
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(host_checks, "RDMA", tmp_path)
    with pytest.raises(Bad, match=r"NCCL pins more on mlx5_0; run `ulimit -l unlimited`"):
        host_checks.memlock(gpus)
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    assert host_checks.memlock(gpus).endswith("NCCL does not use mlx5_0")


# Storage.

MOUNTINFO = """\
21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 21 0:40 / {0}/net rw,relatime - nfs4 server:/x rw
31 30 0:41 / {0}/net/local rw,noexec - tmpfs tmpfs rw
32 21 0:42 / {0}/a\\040blank rw - fuse.sshfs host: rw
33 32 0:43 / {0}/a\\040blank rw - ext4 /dev/sdb rw
"""


def test_on_which_file_system_a_path_lies(tmp_path: Path) -> None:
    (tmp_path / "mountinfo").write_text(MOUNTINFO.format(tmp_path))
    for folder in ("net/local", "a blank"):
        (tmp_path / folder).mkdir(parents=True)

    def kind(path: str) -> tuple[str, bool]:
        mount = mount_of(tmp_path / path, tmp_path / "mountinfo")
        assert mount is not None
        return mount.kind, mount.network

    assert kind("net/not/there/yet") == ("nfs4", True)
    assert kind("net/local/x") == ("tmpfs", False)
    assert kind("a blank/x") == ("ext4", False)  # it hides what was mounted there before
    assert kind("x") == ("ext4", False)
    assert mount_of(tmp_path, tmp_path / "none") is None


def test_where_checkpoints_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mountinfo").write_text(MOUNTINFO.format(tmp_path))
    monkeypatch.setattr(storage, "mount_of", lambda path: mount_of(path, tmp_path / "mountinfo"))
    (tmp_path / "net").mkdir()
    at = {"checkpoint": {"every": 10, "dir": f"{tmp_path}/net/c"}}
    assert "is on a network file system (nfs4 at" in storage.checkpoint(Subject(parse(at)))
    here = {"checkpoint": {"every": 10, "dir": f"{tmp_path}/c"}, "network": {"host": "0.0.0.0"}}
    assert "is on a local disk, but replicas on other machines need a shared one" in storage.checkpoint(
        Subject(parse(here))
    )
    assert storage.checkpoint(ALONE) == "checkpoint.every is 0, and there is no checkpoint.dir: none are written"
    assert "set checkpoint.dir to resume" in storage.checkpoint(Subject(parse({"checkpoint": {"every": 1}})))
    shared = parse({"job": {"runs_dir": f"{tmp_path}/net/runs"}})
    assert "SQLite needs a local disk" in storage.disk(Subject(shared))


def test_disks_that_are_full_or_closed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(storage, "LOG_BYTES", 2**60)
    with pytest.raises(Bad, match=r"are needed; make room"):
        storage.disk(Subject(parse({"job": {"runs_dir": f"{tmp_path}/runs"}})))
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(Bad, match=r"cannot be written; choose another job.runs_dir"):
        storage.disk(Subject(parse({"job": {"runs_dir": f"{tmp_path}/runs"}})))


def test_text_is_counted_and_not_prepared(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_bytes(b"abc" * 1000)
    (text / "b.jsonl").write_text("".join(json.dumps({"text": "d" * n}) + "\n" for n in (10, 0, 20)))
    (text / "c").write_bytes(b"e" * 500)
    for limit in (10**6, 3000, 3010, 3015, 3031, 1):
        expected = len(tokens.Tokens.open(tokens.prepare(str(text), "byte", limit, tmp_path / f"cache{limit}")))
        assert tokens.count(str(text), "byte", limit, 10**9) == expected
    assert 3000 <= tokens.count(str(text), "byte", 10**6, 100) < 3600
    (text / "d.jsonl").write_text("no json\n")
    with pytest.raises(ConfigError, match=r"see line 1"):
        tokens.count(str(text), "byte", 10**6, 10**9)
    config = parse({"data": {"path": str(text / "c")}})
    with pytest.raises(Bad, match=r"500 tokens, one step reads 3072; give more text"):
        storage.data(Subject(config))


# The user's script.


def test_a_script_is_compiled_and_its_imports_are_looked_for_and_it_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def found(text: str, name: str = "train.py") -> str:
        (tmp_path / "train.py").write_text(text)
        return checks.entry(Subject(parse({"entry": name})))

    (tmp_path / "beside.py").touch()
    good = "import beside, json.decoder\nfrom torch import nn\ntry:\n    import gone\nexcept ImportError: pass\n"
    assert found(f"{good}raise SystemExit").endswith("; what it imports is here")
    assert found("def main(): pass", "train:main").startswith("train:main compiles (digest ")
    with pytest.raises(Bad, match=r"train.py imports no_such, nor_such: not installed here; pip install it"):
        found("import no_such.part\nfrom nor_such import x\n")
    with pytest.raises(Bad, match=r"train.py has no mian at its top level"):
        found("def main(): pass", "train:mian")
    with pytest.raises(ConfigError, match=r"line 1: invalid syntax"):
        found("def f(:")
    with pytest.raises(ConfigError, match=r"there is no such file in"):
        found("", "other.py")


def test_the_sizes_of_a_users_model_and_data_are_not_known() -> None:
    subject = Subject(parse({"entry": "train.py"}))
    with pytest.raises(Undecided, match=r"train.py makes the model, whose size is not known here; "):
        host_checks.memory(subject)
    wanted = {check.name for check in CHECKS if check.wanted(subject)}
    assert "entry" in wanted
    assert "data" not in wanted
    assert {"entry", "data"} & {check.name for check in CHECKS if check.wanted(ALONE)} == {"data"}


# Services, versions, devices.


def test_etcd_answers_or_not() -> None:
    gone = "http://127.0.0.1:1"
    with pytest.raises(Bad, match=r"start etcd, or correct lighthouse.etcd"):
        network.etcd(Subject(parse({"lighthouse": {"etcd": [gone]}})))
    with EtcdServer() as server:
        both = Subject(parse({"lighthouse": {"etcd": [gone, server.url]}}))
        assert network.etcd(both).startswith("1 of 2 endpoints answer (")


def test_torch_is_as_new_as_this_package_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    assert storage.installed(ALONE).startswith("torch 2.")
    monkeypatch.setattr(storage, "asked_for", lambda: ["numpy", "torch>=99.1 ; python_version > '3'"])
    with pytest.raises(Bad, match=r"torch must be 99.1 or newer: pip install 'torch>=99.1'"):
        storage.installed(ALONE)
    assert storage.numbers("2.11.0a0+git12") < storage.numbers("2.11.1") < storage.numbers("2.13.0+cpu")
    with pytest.raises(Undecided):
        storage.lower_bound("torch", ["torchft>=1"])


def test_no_gpu_is_a_fact_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "driver", lambda: "")
    assert gpu.device(ALONE) == "ranks compute on the CPU; no GPU is needed, and there is none"
    monkeypatch.undo()
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release\n"
    )
    assert gpu.driver(tmp_path / "version") == "570.86.15"
    assert gpu.driver(tmp_path / "none") == ""


H200 = {"name": "H200", "capability": "9.0", "free": 140 * GIB}
SAID = {"found": "2 GPUs", "built_for": ["sm_75", "sm_90a"], "cuda": "12.8", "nccl": "2.27.5", "triton": "3.7.1"}
SHARED = {"dim": 4096, "layers": 20, "heads": 32}  # 4.2e9 parameters: one rank fits a GPU, two do not


@pytest.mark.parametrize(
    ("gpus", "model", "wrong"),
    [
        ([H200, H200], {}, ""),
        ([{**H200, "capability": "7.0"}], {}, "capability 7.0, this torch is built for sm_75 and newer"),
        ([{**H200, "free": GIB // 64}], {"dim": 1024, "heads": 16}, "end the processes that use it"),
        ([H200], SHARED, "its 2 ranks need more than"),
        ([H200, H200], SHARED, ""),
        ([H200, {**H200, "free": 0}], {}, r"GPU 1 \(H200\) has 0.0 GiB free, a rank needs more"),
        ([H200, H200, {**H200, "free": 0}], {}, ""),  # the one that no rank gets
    ],
)
def test_a_gpu_that_will_do(
    monkeypatch: pytest.MonkeyPatch, gpus: list[dict[str, Any]], model: dict[str, Any], wrong: str
) -> None:
    monkeypatch.setattr(gpu, "ask", lambda *_: {**SAID, "gpus": gpus})
    monkeypatch.setattr(gpu, "driver", lambda: "570.86.15")
    subject = Subject(parse({"train": {"device": "cuda"}, "replicas": 2, "ranks_per_replica": 1, "model": model}))
    if wrong:
        with pytest.raises(Bad, match=wrong):
            gpu.device(subject)
    else:
        versions = "driver 570.86.15, CUDA 12.8, NCCL 2.27.5, triton 3.7.1"
        assert gpu.device(subject) == f"2 GPUs: H200 (capability 9.0); {versions}"


def test_a_child_that_says_nothing_or_hangs_is_undecided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = tmp_path / "sitecustomize.py"  # the child runs it before all else
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    first.write_text("import os\nprint('noise')\nprint('{\"a\": 1}', flush=True)\nos._exit(0)\n")
    assert result.ask("gpu", "cpu", "1") == {"a": 1}
    first.write_text("")
    with pytest.raises(Undecided, match=r"gpu DEVICE RANKS"):
        result.ask("what nobody answers")
    monkeypatch.setattr(result, "CHILD_S", 0.2)
    first.write_text("import time\ntime.sleep(600)\n")
    with pytest.raises(Undecided, match=r"no answer within 0\.2 s"):
        result.ask("gpu", "cpu", "1")


# Ray, without a cluster; tests/ray/test_ray_doctor.py has one.


def node(cpus: float, **labels: str) -> ray_checks.Node:
    return ray_checks.Node({"CPU": cpus, "GPU": 0.0}, labels)


@pytest.mark.parametrize(
    ("ray", "nodes", "placed"),
    [
        ({}, [node(2), node(2), node(2)], 3),
        ({}, [node(1), node(3), node(2)], 2),
        ({"strategy": "PACK"}, [node(1), node(3), node(2)], 3),
        ({"strategy": "SPREAD"}, [node(6)], 3),
        ({"strategy": "STRICT_SPREAD"}, [node(6)], 0),
        ({"strategy": "STRICT_SPREAD"}, [node(6), node(2)], 2),
        ({"cpus_per_rank": 0.5}, [node(3)], 3),
        ({"gpus_per_rank": 1}, [node(9)], 0),
        ({"resources": {"fast": 1}}, [node(9)], 0),
        ({"labels": {"kind": "big"}}, [node(9), node(2, kind="big")], 1),
        ({"zone_label": "zone", "zones": ["a", "b"]}, [node(9, zone="a")], 2),
        ({"zone_label": "zone", "zones": ["a", "b"]}, [node(9, zone="a"), node(2, zone="b")], 3),
    ],
)
def test_how_many_replicas_have_a_place(ray: dict[str, Any], nodes: list[ray_checks.Node], placed: int) -> None:
    config = parse({"ray": ray})
    have = [ray_checks.Node(dict(each.resources), each.labels) for each in nodes]
    assert sum(ray_checks.place(request(config, replica), have) for replica in range(3)) == placed
    assert all(amount >= 0 for each in have for amount in each.resources.values())


CLUSTER = {"address": "x", "ray": "", "python": "", "nodes": [{"resources": {"CPU": 2.0}, "labels": {}}]}


def test_a_cluster_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    here, python = ray_checks.metadata.version("ray"), ray_checks.platform.python_version()
    answers: list[dict[str, Any]] = []
    monkeypatch.setattr(ray_checks, "ask", lambda *_, **__: answers.pop(0))
    well = {**CLUSTER, "ray": here, "python": python}
    closed = {"error": "AuthenticationError: no"}
    assert ray_checks.ray(ALONE) == f"Ray {here}; without --ray-address no cluster is contacted"
    with socket.create_server(("127.0.0.1", 0)) as gcs:
        address = f"127.0.0.1:{gcs.getsockname()[1]}"
        subject = Subject(Config(), ray_address=address)
        answers += [well, closed]
        assert "room for 1 of 3 replicas on 1 nodes; the next one asks for 2 x (CPU 1)" in ray_checks.ray(subject)
        answers += [well, closed]
        with pytest.raises(Bad, match=r"quorum.min_replicas is 2: add nodes"):
            ray_checks.ray(Subject(parse({"quorum": {"min_replicas": 2}}), ray_address=address))
        answers += [well, well]
        with pytest.raises(Bad, match=r"asks for no token: .*RAY_AUTH_MODE=token"):
            ray_checks.ray(subject)
        answers += [{**well, "ray": "1.0.0"}]
        with pytest.raises(Bad, match=rf"Ray is {here} here and 1.0.0 in the cluster"):
            ray_checks.ray(subject)
        answers += [{"error": "AuthenticationError: token"}]
        with pytest.raises(Bad, match=rf"{address}: AuthenticationError: token"):
            ray_checks.ray(subject)
        with pytest.raises(Undecided, match=r"to examine the cluster, give the address"):
            ray_checks.ray(Subject(Config(), ray_address=f"http://{address}"))
    with pytest.raises(Bad, match=r"nothing answers at"):
        ray_checks.ray(subject)
    for bad in ("head", "head:x", ":1"):
        with pytest.raises(Bad, match=r"give HOST:PORT, or auto"):
            ray_checks.ray(Subject(Config(), ray_address=bad))


def test_ray_is_of_interest_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_checks.util, "find_spec", lambda _: None)
    assert not ray_checks.wanted(ALONE)
    assert ray_checks.wanted(Subject(Config(), ray=True))

    def missing(_: str) -> str:
        raise ray_checks.metadata.PackageNotFoundError

    monkeypatch.setattr(ray_checks.metadata, "version", missing)
    with pytest.raises(Bad, match=r"Ray is not installed"):
        ray_checks.ray(Subject(Config(), ray=True))

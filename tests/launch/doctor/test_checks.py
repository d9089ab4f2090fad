import json
import os
import re
import resource
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from ft_hsdp import mounts
from ft_hsdp.config import Config, parse
from ft_hsdp.control_groups import Allowance, allowance
from ft_hsdp.errors import ConfigError
from ft_hsdp.launch.doctor import (
    CHECKS,
    Bad,
    CheckState,
    Subject,
    Undecided,
    checks,
    examine,
    host,
    network,
    result,
    storage,
)
from ft_hsdp.launch.doctor import host as host_checks
from ft_hsdp.launch.doctor import ray as ray_checks
from ft_hsdp.launch.doctor.checks import Check
from ft_hsdp.launch.ray.placement import request
from ft_hsdp.mounts import mount_of
from ft_hsdp.train import tokens
from tests.support.etcd_server import EtcdServer
from tests.support.refused import refused

OK, FAIL, SKIP = CheckState.OK, CheckState.FAIL, CheckState.SKIP
ALONE = Subject(Config())
SPANNING = Subject(parse({"network": {"host": "0.0.0.0"}}))
GPUS = Subject(parse({"train": {"device": "cuda"}}))
GIB = 2**30
ONE_REPLICA = {"replicas": 1, "ranks_per_replica": 2, "hosts": {"per_replica": 2}}


def state(check: Callable[[Subject], str], subject: Subject) -> CheckState:
    """How a check ends."""
    (finding,) = examine(subject, checks=[Check("it", check)])
    return finding.state


@contextmanager
def limited(what: int, soft: int) -> Iterator[None]:
    """This process has another limit for a while."""
    before = resource.getrlimit(what)
    resource.setrlimit(what, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)


@pytest.fixture
def allow(monkeypatch: pytest.MonkeyPatch) -> Callable[[Allowance], None]:
    """Sets what the container leaves to this process."""
    return lambda left: monkeypatch.setattr(host_checks, "allowance", lambda: left)


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


@pytest.mark.parametrize("name", ["localhost", "no-such-host.invalid", "192.0.2.77"])
def test_a_name_that_others_cannot_use_matters_to_a_job_on_several_machines_only(monkeypatch, name) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    assert (state(network.hostname, ALONE), state(network.hostname, SPANNING)) == (OK, FAIL)


ELSEWHERE = ("http://10.0.0.1:1",)  # lighthouses on another machine


@pytest.mark.parametrize(
    ("check", "config", "lighthouses", "ends"),
    [
        (network.host, {"network": {"host": "0.0.0.0"}}, (), OK),
        (network.host, {"network": {"host": "127.0.0.1"}}, (), OK),
        (network.host, {"network": {"host": "no-such-host.invalid"}}, (), FAIL),
        (network.host, {"network": {"host": "192.0.2.77"}}, (), FAIL),
        (network.host, {"network": {"host": "127.0.0.1"}}, ELSEWHERE, FAIL),
        (network.host, {"network": {"host": "localhost"}}, ELSEWHERE, FAIL),
        (network.interface, {}, (), OK),
        (network.interface, {"network": {"state_interface": "127.0.0.7"}}, (), OK),
        (network.interface, {"network": {"state_interface": "192.0.2.77"}}, (), FAIL),
        (network.interface, {"network": {"interfaces": ["lo", "127.0.0.7"]}}, (), OK),
        (network.interface, {"network": {"interfaces": ["lo", "no-such-interface"]}}, (), FAIL),
        (storage.disk, {"job": {"runs_dir": "/proc/runs"}}, (), FAIL),
        # copies that cannot be kept are not memory that lacks
        (host_checks.memory, {**ONE_REPLICA, "memory": {"copies": 3}}, (), OK),
    ],
)
def test_what_a_check_says_of_a_configuration(check, config, lighthouses, ends) -> None:
    assert state(check, Subject(parse(config), lighthouses)) is ends


def test_ports_that_are_free_and_taken() -> None:
    network.port(ALONE)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"network.port: got {number}"):
            network.port(Subject(parse({"network": {"port": number}})))
    for _ in range(50):  # whatever else runs here may take one of two neighbouring ports in between
        with socket.create_server(("127.0.0.1", 0)) as free:
            number = free.getsockname()[1]
        several = {"network": {"port": number}, "lighthouse": {"count": 2, "etcd": ["http://e"]}}
        with suppress(ConfigError):
            assert f"{number} to {number + 1}" in network.port(Subject(parse(several)))
            return
    pytest.fail("no two neighbouring ports are ever free")


def test_as_many_sockets_as_the_job_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert state(network.sockets, ALONE) is OK
    with pytest.raises(Undecided):
        network.local_range(tmp_path / "none")
    monkeypatch.setattr(network, "local_range", lambda: (40000, 40050))
    with pytest.raises(Bad, match="ip_local_port_range"):
        network.sockets(ALONE)


@pytest.mark.parametrize(
    ("variable", "value", "ends"),
    [
        ("GLOO_SOCKET_IFNAME", "lo", OK),
        ("GLOO_SOCKET_IFNAME", "lo,ib77", FAIL),
        ("NCCL_SOCKET_IFNAME", "ib,l", OK),
        ("NCCL_SOCKET_IFNAME", "=l", FAIL),
        ("NCCL_SOCKET_IFNAME", "^docker", OK),
    ],
)
def test_interfaces_of_the_environment_exist(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, ends: CheckState
) -> None:
    monkeypatch.setenv(variable, value)
    assert state(network.interface, ALONE) is ends


@pytest.mark.parametrize(("synchronized", "spanning"), [(True, OK), (False, SKIP)])
def test_a_clock_that_nobody_sets(monkeypatch, synchronized, spanning) -> None:
    monkeypatch.setattr(network, "synchronized", lambda: synchronized)
    assert (state(network.clock, ALONE), state(network.clock, SPANNING)) == (OK, spanning)


# Control groups, on trees as the kernel shows them.


def tree(folder: Path, files: Mapping[str, str]) -> tuple[Path, Path]:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(os.fsencode(text))
    return folder / "cgroup", folder / "fs"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cgroup": "0::/\n"}, Allowance()),
        (
            {
                "cgroup": "0::/pod/b\udcf6x\n",
                "fs/pod/memory.max": f"{4 * GIB}\n",
                "fs/pod/memory.current": f"{3 * GIB}\n",
                "fs/pod/memory.stat": f"anon 1\ninactive_file {GIB}\n",
                "fs/pod/cpu.max": "150000 100000\n",
                "fs/pod/b\udcf6x/memory.max": "max\n",
                "fs/pod/b\udcf6x/cpu.max": "max 100000\n",
                "fs/pod/b\udcf6x/pids.max": "100\n",
                "fs/pod/b\udcf6x/pids.current": "30\n",
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


def test_memory_of_ranks_spares_and_snapshots(allow: Callable[[Allowance], None]) -> None:
    small, spared = Config(), parse({"spares": 4})
    assert host_checks.needed(spared, 3) - host_checks.needed(small, 3) > 4 * host_checks.RANK_BYTES
    assert host_checks.needed(small, 3) > host_checks.needed(small, 1)
    copied, alone = (parse({**ONE_REPLICA, "memory": {"copies": copies}}) for copies in (2, 1))
    more = host_checks.needed(copied, 1) - host_checks.needed(alone, 1)
    assert more == 3 * host_checks.weights(copied) + (host_checks.foreign(copied) or 0), "a third slot of its own"
    allow(Allowance(GIB))
    with pytest.raises(Bad, match="this container's limit"):
        host_checks.memory(ALONE)


@pytest.mark.parametrize(
    ("config", "ends", "word"),
    [
        ({}, OK, "healthy replicas"),
        (ONE_REPLICA, OK, "63.1 MiB"),
        ({**ONE_REPLICA, "entry": "train.py"}, OK, "hosts keep copies"),
        ({"replicas": 1}, OK, "one host only"),
        ({"network": {"host": "0.0.0.0"}}, SKIP, "launcher.py plan --hosts"),
        ({"memory": {"apart": "zone"}, "hosts": {"labels": {"r0h0": "rack-7"}}}, SKIP, "no zone"),
        ({**ONE_REPLICA, "memory": {"copies": 3}}, FAIL, "memory.copies: got 3"),
    ],
)
def test_which_copies_a_job_will_have(config: dict[str, Any], ends: CheckState, word: str) -> None:
    (found,) = examine(Subject(parse(config)), checks=[Check("copies", host_checks.copies)])
    assert (found.state, word in found.text) == (ends, True), found.text


def test_memory_can_be_sealed() -> None:
    host_checks.memfd(ALONE)
    with limited(resource.RLIMIT_NOFILE, 0), pytest.raises(Bad, match=r"memfd_create\(2\)"):
        host_checks.memfd(ALONE)


@pytest.mark.parametrize("there", ["/proc", "/none"], ids=["full", "none"])
def test_shared_memory_matters_to_nccl(monkeypatch: pytest.MonkeyPatch, there: str) -> None:
    monkeypatch.setattr(host_checks, "SHM", Path(there))
    assert (state(host_checks.shm, ALONE), state(host_checks.shm, GPUS)) == (OK, FAIL)


@pytest.mark.parametrize(
    ("labels", "domains", "said"),
    [
        ({}, "", "zone and rack"),
        ({"*": "7"}, "", "hosts.labels; the zone"),
        ({"*": "a/"}, "", "hosts.labels; the rack"),
        ({}, "zone=a,rack=7", "FT_HSDP_DOMAINS"),
    ],
)
def test_where_this_machine_stands(monkeypatch, labels, domains, said) -> None:
    monkeypatch.setenv("FT_HSDP_HOST", "node7")
    monkeypatch.setenv("FT_HSDP_DOMAINS", domains)
    for variable in ("SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN"):
        monkeypatch.delenv(variable, raising=False)
    assert said in host_checks.domains(Subject(parse({"hosts": {"labels": labels}})))


def test_open_files() -> None:
    with limited(resource.RLIMIT_NOFILE, 256):
        with pytest.raises(Bad, match="ulimit -n 320"):
            host_checks.files(ALONE)
        host_checks.files(Subject(parse({"replicas": 2})))


def test_threads(allow: Callable[[Allowance], None]) -> None:
    allow(Allowance(threads=100))
    assert state(host_checks.processes, Subject(Config(), ray=True)) is OK
    with pytest.raises(Bad, match="this container may start 100"):
        host_checks.processes(ALONE)


def test_memory_that_rdma_pins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host_checks, "RDMA", tmp_path / "cards")
    with limited(resource.RLIMIT_MEMLOCK, 2**16):
        assert state(host_checks.memlock, GPUS) is OK
        (tmp_path / "cards" / "mlx5_0").mkdir(parents=True)
        assert state(host_checks.memlock, GPUS) is FAIL
        monkeypatch.setenv("NCCL_IB_DISABLE", "1")
        assert state(host_checks.memlock, GPUS) is OK


MOUNTINFO = """\
21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 21 0:40 / {0}/net rw,relatime - nfs4 server:/x rw
31 30 0:41 / {0}/net/local rw,noexec - tmpfs tmpfs rw
32 21 0:42 / {0}/a\\040bl\udce4nk rw - fuse.sshfs host: rw
33 32 0:43 / {0}/a\\040bl\udce4nk rw - ext4 /dev/sdb rw
"""


def test_on_which_file_system_a_path_lies(tmp_path: Path) -> None:
    (tmp_path / "mountinfo").write_bytes(os.fsencode(MOUNTINFO.format(tmp_path)))
    for folder in ("net/local", "a bl\udce4nk"):
        (tmp_path / folder).mkdir(parents=True)

    def kind(path: str) -> tuple[str, bool]:
        mount = mount_of(tmp_path / path, tmp_path / "mountinfo")
        assert mount is not None
        return mount.kind, mount.network

    assert kind("net/not/there/yet") == ("nfs4", True)
    assert kind("net/local/x") == ("tmpfs", False)
    assert kind("a bl\udce4nk/x") == ("ext4", False)  # it hides what was mounted there before
    assert kind("x") == ("ext4", False)
    assert mount_of(tmp_path, tmp_path / "none") is None


def test_where_checkpoints_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mountinfo").write_bytes(os.fsencode(MOUNTINFO.format(tmp_path)))
    for module in (storage, mounts):
        monkeypatch.setattr(module, "mount_of", lambda path: mount_of(path, tmp_path / "mountinfo"))
    (tmp_path / "net").mkdir()
    at = {"checkpoint": {"every": 10, "dir": f"{tmp_path}/net/c"}}
    here = {"checkpoint": {"every": 10, "dir": f"{tmp_path}/c"}, "network": {"host": "0.0.0.0"}}
    for config, word in (
        (at, "network file system"),
        (here, "need a shared one"),
        ({}, "none are written"),
        ({"checkpoint": {"every": 1}}, "set checkpoint.dir"),
    ):
        assert word in storage.checkpoint(Subject(parse(config)))
    job = {"job": {"runs_dir": f"{tmp_path}/net/runs"}}
    with pytest.raises(Bad, match=r"lighthouse\.etcd: .*nfs4"):
        storage.disk(Subject(parse(job)))
    storage.disk(Subject(parse({**job, "lighthouse": {"etcd": ["http://a:2379"]}})))
    storage.disk(Subject(parse(job), lighthouses=("http://a:1",)))


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
    refused(lambda: tokens.count(str(text), "byte", 10**6, 10**9), r"see line 1")
    with pytest.raises(Bad, match=r"500 tokens, .* 3072"):
        storage.data(Subject(parse({"data": {"path": str(text / "c")}})))


def test_a_script_is_compiled_and_its_imports_are_looked_for_and_it_does_not_run(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)

    def found(text: str, name: str = "train.py") -> str:
        (tmp_path / "train.py").write_text(text)
        return checks.entry(Subject(parse({"entry": name})))

    (tmp_path / "beside.py").touch()
    good = "import beside, json.decoder\nfrom torch import nn\ntry:\n    import gone\nexcept ImportError: pass\n"
    found(f"{good}raise SystemExit")
    found("def main(): pass", "train:main")
    with pytest.raises(Bad, match="no_such, nor_such"):
        found("import no_such.part\nfrom nor_such import x\n")
    with pytest.raises(Bad, match="no mian"):
        found("def main(): pass", "train:mian")
    refused(lambda: found("def f(:"), "line 1")
    refused(lambda: found("", "other.py"), r"other\.py")


def test_the_sizes_of_a_users_model_and_data_are_not_known() -> None:
    subject = Subject(parse({"entry": "train.py"}))
    assert state(host_checks.memory, subject) is SKIP
    wanted = {check.name for check in CHECKS if check.wanted(subject)}
    assert "entry" in wanted
    assert "data" not in wanted
    assert {"entry", "data"} & {check.name for check in CHECKS if check.wanted(ALONE)} == {"data"}


def test_etcd_answers_or_not() -> None:
    gone = "http://127.0.0.1:1"
    assert state(network.etcd, Subject(parse({"lighthouse": {"etcd": [gone]}}))) is FAIL
    with EtcdServer() as server:
        both = Subject(parse({"lighthouse": {"etcd": [gone, server.url]}}))
        assert "1 of 2" in network.etcd(both)


def test_torch_is_as_new_as_this_package_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    assert state(storage.installed, ALONE) is OK
    monkeypatch.setattr(storage, "asked_for", lambda: ["numpy", "torch>=99.1 ; python_version > '3'"])
    with pytest.raises(Bad, match=r"torch must be 99.1 or newer: pip install 'torch>=99.1'"):
        storage.installed(ALONE)
    assert storage.numbers("2.11.0a0+git12") < storage.numbers("2.11.1") < storage.numbers("2.13.0+cpu")
    with pytest.raises(Undecided):
        storage.lower_bound("torch", ["torchft>=1"])


def test_no_gpu_is_a_fact_on_the_cpu(tmp_path: Path) -> None:
    assert state(host.device, ALONE) is OK
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release\n"
    )
    assert host.driver(tmp_path / "version") == "570.86.15"
    assert host.driver(tmp_path / "none") == ""


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
def test_a_gpu_that_will_do(monkeypatch, gpus, model, wrong) -> None:
    monkeypatch.setattr(host, "ask", lambda *_: {**SAID, "gpus": gpus})
    subject = Subject(parse({"train": {"device": "cuda"}, "replicas": 2, "ranks_per_replica": 1, "model": model}))
    if wrong:
        with pytest.raises(Bad, match=wrong):
            host.device(subject)
    else:
        assert state(host.device, subject) is OK


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
        ({"resources": {"CPU": 0.5}}, [node(3)], 3),
        ({"resources": {"GPU": 1}}, [node(9)], 0),
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
    assert state(ray_checks.ray, ALONE) is OK
    with socket.create_server(("127.0.0.1", 0)) as gcs:
        address = f"127.0.0.1:{gcs.getsockname()[1]}"
        subject = Subject(Config(), ray_address=address)
        answers += [well, closed]
        assert "room for 1" in ray_checks.ray(subject)
        two = Subject(parse({"quorum": {"min_replicas": 2}}), ray_address=address)
        refusals: list[tuple[Subject, list[dict[str, Any]], str]] = [
            (two, [well, closed], "quorum.min_replicas"),
            (subject, [well, well], "RAY_AUTH_MODE=token"),
            (subject, [{**well, "ray": "1.0.0"}], rf"{here} here and 1\.0\.0"),
            (subject, [{"error": "AuthenticationError: token"}], f"{address}: AuthenticationError"),
        ]
        for asked, told, word in refusals:
            answers += told
            with pytest.raises(Bad, match=word):
                ray_checks.ray(asked)
        assert state(ray_checks.ray, Subject(Config(), ray_address=f"http://{address}")) is SKIP
    for bad in (address, "head", "head:x", ":1", "http://[::1"):
        with pytest.raises(Bad, match=re.escape(bad)):
            ray_checks.ray(Subject(Config(), ray_address=bad))


def test_ray_is_of_interest_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ray_checks.wanted(Subject(Config(), ray=True))

    def missing(_: str) -> str:
        raise ray_checks.metadata.PackageNotFoundError

    monkeypatch.setattr(ray_checks.metadata, "version", missing)
    with pytest.raises(Bad, match=r"Ray is not installed"):
        ray_checks.ray(Subject(Config(), ray=True))

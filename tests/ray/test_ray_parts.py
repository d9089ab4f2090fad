import asyncio
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import ray

from ft_hsdp.config import Config, dump, load, parse
from ft_hsdp.config.entry import stamped
from ft_hsdp.errors import ConfigError, Retryable
from ft_hsdp.jsonl import replace_json
from ft_hsdp.launch.ray import actor, logs, placement, submit
from ft_hsdp.launch.ray.actor import ActorSetup, HostActor, HostOrder, make_folder, place_script
from ft_hsdp.launch.ray.cluster import RayOutput, check_listening, connected, destination
from ft_hsdp.launch.ray.logs import LogPiece, LogReceiver, LogSender
from ft_hsdp.launch.ray.submit import check, entrypoint, job_environment, not_used, with_hosts, within_reach
from ft_hsdp.launch.run.directory import RunDir
from ft_hsdp.train.identity import host_path
from tests.support.refused import refused
from tests.support.started_job import ROOT, launcher


def config(**document: object) -> Config:
    return parse({"job": {"name": "a"}, **document})


def test_a_replica_asks_for_a_bundle_per_host_in_its_zone() -> None:
    ray = {"strategy": "PACK", "resources": {"CPU": 0.5, "GPU": 1, "nic": 2, "none": 0}, "labels": {"kind": "x"}}
    asked = [
        placement.request(config(ranks_per_replica=2, ray={**ray, "zones": ["p", "q"], "zone_label": "zone"}), n)
        for n in range(3)
    ]
    assert [each.name for each in asked] == ["ft_hsdp-a-0", "ft_hsdp-a-1", "ft_hsdp-a-2"]
    assert [each.labels["zone"] for each in asked] == ["p", "q", "p"]
    assert asked[0].bundle == {"CPU": 0.5, "GPU": 1, "nic": 2}
    said = placement.vacancy(asked[1], {"CPU": 3.0, "GPU": 0.0}, 4)
    assert "2 x (CPU 0.5, GPU 1" in said
    assert "CPU 3, GPU 0" in said
    packed = placement.request(config(ranks_per_replica=2, ray={"resources": {"GPU": 0.5}}), None)
    assert (packed.name, packed.size, packed.bundle) == ("ft_hsdp-a-spare", 1, {"CPU": 2.0, "GPU": 1.0})
    assert replace(packed, labels={"kind": "x"}, avoid=("n2",)).selector == {
        "kind": "x",
        "ray.io/node-id": "!in(n2)",
    }


@pytest.mark.parametrize(
    ("labels", "given", "path"),
    [
        ({}, {}, "vm-0123abcd"),
        ({"ray.io/availability-zone": "a", "rack": "7"}, {}, "a/7/vm-0123abcd"),
        ({"ray.io/availability-zone": "a"}, {}, "a//vm-0123abcd"),
        ({"rack": "7"}, {"FT_HSDP_DOMAINS": "rack=8"}, "8/vm-0123abcd"),
        ({"rack": "7"}, {"FT_HSDP_HOST": "node7"}, "7/node7"),
    ],
)
def test_a_host_is_a_node_with_its_labels(labels: dict[str, str], given: dict[str, str], path: str) -> None:
    told = placement.host_environment("vm", "0123abcdef", labels, config().ray, given)
    assert host_path({}, told) == path
    assert host_path({"*": "b/9"}, told).startswith("b/9/")  # hosts.labels comes first
    strange = placement.host_environment("vm", "0123abcdef", {}, config().ray, {"FT_HSDP_HOST": "a,b c"})
    assert strange["FT_HSDP_HOST"] == "a-b-c", "the names of the hosts of a replica have commas between"
    longest = placement.host_environment("m" * 99, "0123456789", {"rack": "r" * 99}, config().ray, {})
    assert host_path({}, longest) == f"{'r' * 63}/{'m' * 40}-01234567"


@pytest.mark.parametrize(
    ("ray", "why"),
    [({"resources": {"CPU": 0}}, "a rank that asks for nothing"), ({"resources": {"GPU": 1.5}}, "whole")],
)
def test_what_no_cluster_gives_is_refused(ray: dict[str, object], why: str) -> None:
    refused(lambda: config(ray=ray), why)


def test_what_submit_does_not_do_is_refused() -> None:
    for document, key in (
        ({"train": {"device": "cuda"}}, "ray.resources.GPU"),
        ({"lighthouse": {"etcd": ["http://127.0.0.1:1"], "count": 3}}, "lighthouse.count"),
        ({"chaos": [{"kind": "reset", "at_s": 1, "replicas": [0]}]}, r"chaos\.0\.kind"),
        ({"memory": {"copies": 8}, "ray": {"strategy": "PACK"}}, r"memory\.copies: got 8; allowed: at most 6"),
        ({"memory": {"copies": 4}, "ranks_per_replica": 4}, r"memory\.copies: got 4; allowed: at most 3 here"),
        ({"memory": {"shrink_to": 1}, "ranks_per_replica": 2, "hosts": {"per_replica": 2}}, r"memory\.shrink_to"),
        ({"ranks_per_replica": 3, "ray": {"resources": {"GPU": 0.5}}}, r"ray\.resources\.GPU"),
    ):
        refused(lambda document=document: check(config(**document)), key)
    check(config())
    check(config(memory={"copies": 6}, ray={"strategy": "PACK"}))


def test_a_replica_has_the_hosts_that_its_strategy_says_and_what_does_not_count_is_named() -> None:
    assert not_used(config()) == not_used(config(hosts={"labels": {"node7": "a/7"}})) == []
    (said,) = not_used(config(hosts={"per_replica": 1, "spare": 1}))
    assert "hosts.per_replica: 1" in said
    assert "hosts.spare: 1" in said
    spread = config(ranks_per_replica=2, spares=2, ray={"strategy": "SPREAD"}, memory={"copies": 2})
    (said,) = not_used(spread)
    assert said.startswith("spares: 2")
    assert (with_hosts(spread).hosts.per_replica, with_hosts(spread).spares) == (2, 0)
    packed = with_hosts(config(ranks_per_replica=2, spares=2, hosts={"per_replica": 2, "spare": 1}))
    assert (packed.hosts.per_replica, packed.hosts.spare, packed.spares) == (None, 0, 2)


@pytest.mark.parametrize(
    ("host", "alone", "expected"),
    [
        ("127.0.0.1", True, "127.0.0.1"),
        ("127.0.0.1", False, "10.0.0.1"),
        ("localhost", False, "10.0.0.1"),
        ("0.0.0.0", True, "10.0.0.1"),
        ("192.168.3.4", False, "192.168.3.4"),
    ],
)
def test_the_lighthouse_listens_where_the_nodes_reach_it(host: str, alone: bool, expected: str) -> None:
    assert within_reach(config(network={"host": host}), "10.0.0.1", alone).network.host == expected


@pytest.mark.parametrize(
    ("document", "has_room"),
    [
        ({"replicas": 2, "ranks_per_replica": 2}, True),
        ({"replicas": 3, "ranks_per_replica": 2}, False),  # an autoscaler is to bring more nodes
        ({"replicas": 2, "max_replicas": 4, "ranks_per_replica": 2}, False),
        ({"replicas": 2, "ray": {"resources": {"nic": 1}}}, False),
        ({"replicas": 2, "ray": {"zones": ["a", "b"]}}, False),
    ],
)
def test_a_cluster_of_one_node_that_is_too_small_is_to_grow(document: dict[str, object], has_room: bool) -> None:
    assert placement.has_room(config(**document), {"CPU": 4.0, "memory": 1e9}) == has_room


def test_a_destination_is_a_head_or_its_jobs_api(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for address in ("auto", "10.0.0.1:6379", "head:6379", "[fd00::1]:6379", "http://head:8265", "https://head"):
        assert destination(address) == address
    no_jobs_api = (
        "http://head:99999",
        "http://head:abc",
        "http://[::1",
        "http://",
        "https://head:0",
        "http://a..b",
    )
    for address in (
        "ray://head:10001",
        "head",
        "head:0",
        "head:x",
        ":6379",
        "",
        "[::1:1",
        "fd00::1:1",
        *no_jobs_api,
    ):
        for take in (destination, check_listening):
            refused(lambda address=address, take=take: take(address), "http://HOST:8265")
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert (destination("auto"), destination("other:1")) == ("head:6379", "other:1")


def test_a_job_from_outside_names_files_that_the_cluster_has() -> None:
    there = entrypoint(Path("configs/ray.yaml"), ["--train.steps=6 0"], uploaded=True, json=True)
    assert shlex.split(there)[-3:] == ["configs/ray.yaml", "--train.steps=6 0", "--json"]
    assert str(Path("configs/ray.yaml").resolve()) in entrypoint(
        Path("configs/ray.yaml"), [], uploaded=False, json=False
    )


def test_a_driver_that_is_told_to_stop_has_time_for_it() -> None:
    waits = config().timeouts
    env = job_environment(config(ray={"runtime_env": {"env_vars": {"A": "1"}}}))
    assert env["env_vars"]["A"] == "1"
    assert int(env["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) > waits.stop_s + waits.gone_s
    chosen = {"RAY_JOB_STOP_WAIT_TIME_S": "9"}
    assert job_environment(config(ray={"runtime_env": {"env_vars": chosen}}))["env_vars"] == chosen
    with pytest.raises(ConfigError, match="RAY_JOB_STOP_WAIT_TIME_S: got 'soon'; allowed: whole seconds"):
        job_environment(config(ray={"runtime_env": {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "soon"}}}))


def test_whole_lines_travel_in_order_and_once(tmp_path: Path) -> None:
    there, run = tmp_path / "there", tmp_path / "run"
    ranks = there / "replicas" / "1"
    ranks.mkdir(parents=True)
    server = there / "forkserver.log"
    server.write_text("loaded\n")
    out, into = LogSender(there, {server: "nodes/n-7.log"}), LogReceiver(run)
    log = (ranks / "fed.jsonl").open("w", buffering=1)
    log.write('{"a": 1}\n{"a"')
    pieces, whole = out.take(flush=False)
    assert pieces == [LogPiece("replicas/1/fed.jsonl", b'{"a": 1}\n'), LogPiece("nodes/n-7.log", b"loaded\n")]
    assert whole
    into.add(pieces)
    assert out.take(flush=False) == ([], True)
    log.write(": 2}\n")
    log.close()
    (ranks / "rank0.log").write_text("the end")
    into.add(out.take(flush=False)[0])
    ours = run / "replicas" / "1"
    assert not (ours / "rank0.log").exists()
    into.add(out.take(flush=True)[0])
    (ranks / "final.json").write_text("{}")
    into.add(out.take(flush=True)[0])
    assert out.take(flush=True) == ([], True)
    assert (ours / "fed.jsonl").read_text() == '{"a": 1}\n{"a": 2}\n'
    assert (ours / "rank0.log").read_text() == "the end\n"
    assert (ours / "final.json").read_text() == "{}"


def test_an_actor_sends_what_it_wrote_as_a_spare_and_as_each_replica(tmp_path: Path) -> None:
    there, run = tmp_path / "there", tmp_path / "run"
    out, into = LogSender(there, {}), LogReceiver(run)
    for name in ("spares/3-rank0.log", "replicas/0/rank0.log", "replicas/12/rank0.log", "replicas/12/final.json"):
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        (there / name).write_text(f"of {name}\n")
        into.add(out.take(flush=False)[0])
        assert (run / name).read_text() == f"of {name}\n"
    (there / "config.yaml").write_text("its own\n")
    (there / "spares" / "spares.json").write_text("{}")
    assert out.take(flush=True) == ([], True)


def test_what_is_held_at_once_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "LIMIT", 64)
    ranks = tmp_path / "replicas" / "0"
    ranks.mkdir(parents=True)
    for name in ("a.log", "b.jsonl"):
        (ranks / name).write_text("".join(f"{n:09}\n" for n in range(50)))
    (ranks / "c.log").write_text("x" * 200)  # a line that is longer than that
    out, into, turns = LogSender(tmp_path, {}), LogReceiver(tmp_path / "run"), 0
    while True:
        pieces, whole = out.take(flush=True)
        assert sum(len(piece.data) for piece in pieces) < 2 * 64
        if turns == 0:
            assert pieces[0].name == "replicas/0/b.jsonl"
        into.add(pieces)
        turns += 1
        if whole and not pieces:
            break
    assert turns > 10
    taken = tmp_path / "run" / "replicas" / "0"
    for name in ("a.log", "b.jsonl"):
        assert (taken / name).read_text() == (ranks / name).read_text()
    assert (taken / "c.log").read_text() == "x" * 200 + "\n"


@pytest.mark.parametrize(
    "name",
    [
        *("../fed.jsonl", "fed.jsonl", "config.yaml", "token", "spares/spares.json", "spares/fed.jsonl"),
        *("final.json", "replicas/0/.hidden.log", "replicas/0/../a.log", "replicas/../a.log"),
        *("replicas/0/a/b.log", "replicas/0/processes.json", "nodes/../token.log", "/tmp/a.log"),
    ],
)
def test_only_logs_are_taken_from_a_node(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="no log"):
        LogReceiver(tmp_path).add([LogPiece(name, b"x")])
    assert not list(tmp_path.iterdir())


def test_a_node_s_folder_is_private_and_swept(tmp_path: Path) -> None:
    mine, gone = make_folder(tmp_path / "f", "a"), make_folder(tmp_path / "f", "a")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    replace_json(gone / "owner.json", {"pid": ended.pid, "host": socket.gethostname()})
    foreign = make_folder(tmp_path / "f", "a")  # on a file system that another host has, too
    replace_json(foreign / "owner.json", {"pid": ended.pid, "host": "elsewhere"})
    third = make_folder(tmp_path / "f", "a")
    assert mine.stat().st_mode & 0o777 == 0o700
    assert {p.name for p in (tmp_path / "f").iterdir()} == {mine.name, foreign.name, third.name}
    (tmp_path / "file").touch()
    refused(lambda: make_folder(tmp_path / "file", "a"), rf"ray\.folder: .* on {socket.gethostname()}")


def test_what_ray_prints_is_kept_apart(tmp_path: Path) -> None:
    said = RayOutput()
    print("early", file=said)
    said.keep(tmp_path / "ray.log")
    print("late", file=said)
    assert (tmp_path / "ray.log").read_text() == "early\nlate\n"


@pytest.mark.multiproc
def test_without_ray_there_is_one_line_and_all_else_works(tmp_path: Path) -> None:
    shutil.copy(ROOT / "configs" / "quickstart.yaml", tmp_path / "c.yaml")
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "ray.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'ray'\", name='ray')\n"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "without")}
    for words in (["submit", "c.yaml"], ["status", "--ray-address", "auto"]):
        done = launcher(*words, cwd=tmp_path, env=env)
        assert (done.returncode, len(done.stderr.splitlines())) == (64, 1), done.stderr
        assert "pip install" in done.stderr
    assert launcher("--help", cwd=tmp_path, env=env).returncode == 0


def test_a_folder_that_others_control_is_refused(tmp_path: Path) -> None:
    """Its owner could put a folder of his own in the place of the one that gets the token."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    if os.getuid() == 0:
        os.chown(theirs, 12345, -1)
    else:
        theirs = Path("/")  # of root
    refused(lambda: make_folder(theirs, "a"), r"ray\.folder")
    loose = tmp_path / "loose"
    loose.mkdir()
    loose.chmod(0o777)
    refused(lambda: make_folder(loose, "a"), "mode 777")
    loose.chmod(0o1777)
    assert make_folder(loose, "a").stat().st_mode & 0o777 == 0o700
    own = make_folder(tmp_path / "of-{uid}", "a")
    assert own.parent.name == f"of-{os.getuid()}"
    assert own.parent.stat().st_mode & 0o777 == 0o700
    assert "{uid}" in parse({}).ray.folder, "two users of a node do not need the same folder"


def test_a_node_without_the_script_gets_it_and_another_one_keeps_its_own(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "mine" / "train.py"
    script.parent.mkdir()
    script.write_text("print(1)\n")
    begun = stamped(config(entry="mine/train.py"))
    run = RunDir(tmp_path / "actor")
    run.path.mkdir()
    for there in (True, False):
        run.config.write_text(dump(begun))
        if not there:
            shutil.rmtree(script.parent)
        place_script(run, b"print(1)\n")
        placed = load(run.config)
        assert placed.entry == ("mine/train.py" if there else str(run.path / "entry" / "train.py"))
        assert stamped(placed) == placed, "its digest is the one with which the job began"
    run.config.write_text(dump(config()))
    place_script(run, b"")
    assert load(run.config).entry is None


def test_a_job_whose_submission_is_interrupted_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes when the cluster has the job, and before its answer is here."""
    running: set[str] = set()

    class Client:
        def __init__(self, url: str) -> None: ...

        def submit_job(self, *, entrypoint: str, runtime_env: object, submission_id: str = "unknown") -> str:
            running.add(submission_id)
            raise KeyboardInterrupt

        def stop_job(self, job: str) -> None:
            running.discard(job)

    monkeypatch.setattr(submit, "check_listening", lambda _: None)
    monkeypatch.setattr(submit.ray.job_submission, "JobSubmissionClient", Client)
    with pytest.raises(KeyboardInterrupt):
        submit.submit_through_jobs_api(
            parse({"job": {"name": "a"}}), tmp_path / "c.yaml", (), "http://h:8265", json=False
        )
    assert not running


def test_what_ray_says_of_an_environment_has_names_alone() -> None:
    given = {"env_vars": {"API_KEY": "hunter2"}, "pip": 3}
    with mock.patch.object(ray, "init", side_effect=ValueError("no such package")):
        line = refused(lambda: connected("auto", given).__enter__(), "env_vars, pip", key="ray.runtime_env")
    assert "hunter2" not in line
    line = refused(lambda: config(ray={"runtime_env": {"env_vars": {"API_KEY": 12345}}}), "quotes")
    assert "12345" not in line


@contextmanager
def on_a_node(folder: Path, **document: object) -> Iterator[tuple[HostActor, HostOrder]]:
    """An actor, and what it is told to run; ranks have stand-ins, and no lighthouse answers."""

    class Agent:
        name, held = "vm-r0", dict[str, Any]()

        def __init__(self, *_: object, say: Any, **__: object) -> None:
            say("no lighthouse answers")

        async def run(self) -> int:
            return 0

    class Ranks:
        def __init__(self, *_: object, **__: object) -> None:
            self.pool, self.close = SimpleNamespace(shown=[]), mock.AsyncMock()

    given = config(ray={"folder": str(folder)}, timeouts={"reach_s": 0.01}, **document)
    context = SimpleNamespace(get_node_id=lambda: "n1", get_node_labels=dict, get_accelerator_ids=dict)
    standins = {"HostAgent": Agent, "LocalRanks": Ranks, "ForkServer": lambda *_, **__: mock.AsyncMock()}
    with (
        socket.socket() as silent,
        mock.patch.dict(os.environ),
        mock.patch.object(ray.util, "get_node_ip_address", return_value="127.0.0.1"),
        mock.patch.object(ray, "get_runtime_context", return_value=context),
        mock.patch.multiple(actor, **standins),
    ):
        silent.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        order = (dump(given), "t" * 64, "k" * 64, (url,), str(folder / "elsewhere"), "127.0.0.1")
        yield HostActor(ActorSetup("a", given.ray, "", "m", (), 1.0)), HostOrder("r0", (0, 0), (0,), None, *order)


async def test_a_node_that_reaches_no_lighthouse_or_is_broken_is_none_for_a_host(tmp_path: Path) -> None:
    with on_a_node(tmp_path, hosts={"check": 0.01}) as (host, order):
        with pytest.raises(Retryable, match=f"{socket.gethostname()}: .*{order.urls[0]}"):
            await host.open(order)
        broken = mock.AsyncMock(return_value="hosts.check: disk")
        with (
            mock.patch.object(actor, "wait_for_lighthouse"),
            mock.patch.object(actor.burn_in, "failure", broken),
            pytest.raises(Retryable, match=f"{socket.gethostname()}: hosts.check"),
        ):
            await host.open(order)


async def test_what_an_agent_says_on_a_node_arrives_in_a_log(tmp_path: Path) -> None:
    with on_a_node(tmp_path) as (host, order), mock.patch.object(actor, "wait_for_lighthouse"):
        await host.open(order)
        await asyncio.sleep(0)
        (piece,) = (await host.news(0)).pieces
        assert (piece.name.startswith("nodes/"), piece.data) == (True, b"no lighthouse answers\n")
        await host.close()

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from ft_hsdp import address, protocol
from ft_hsdp.config import Config, config_hash, dump, parse
from ft_hsdp.core.grant import Continue, Grant
from ft_hsdp.errors import ConfigError
from ft_hsdp.launch.run.directory import alive, read_json
from ft_hsdp.secret import TOKEN_VARIABLE, worker_token
from lighthouse import __main__ as program
from lighthouse import runtime
from tests.support.lighthouse.lighthouse_helpers import TOKEN, ask, at, name
from tests.support.lighthouse.signed import BlockingProof
from tests.support.waiting import until

REPO = Path(__file__).resolve().parents[2]
START_S = 30.0


@pytest.fixture
def run(tmp_path):
    """A run directory of two replicas."""
    return furnish(tmp_path / "job")


def furnish(folder, **keys):
    folder.mkdir()
    (folder / "config.yaml").write_text(dump(parse({"replicas": 2, "train": {"steps": 10}, **keys})))
    (folder / "token").write_text(TOKEN)
    return folder


def spawn(run, *arguments, **environment):
    command = [sys.executable, "-m", "lighthouse", "--run", str(run), *arguments]
    env = {k: v for k, v in os.environ.items() if k != TOKEN_VARIABLE} | environment
    return subprocess.Popen(command, cwd=REPO, env=env, stderr=subprocess.PIPE)


@contextmanager
def lighthouse(run, *arguments, **environment):
    """(process, url) of a lighthouse that listens; it is killed at the end."""
    with spawn(run, *arguments, **environment) as process:
        try:
            yield process, listening(run, process)
        finally:
            process.kill()


def listening(run, process):
    file = run / "lighthouse.json"

    def own() -> bool:
        assert process.poll() is None, f"exit {process.returncode}: {process.stderr.read().decode()}"
        return file.is_file() and json.loads(file.read_text())["pid"] == process.pid

    until(own, "it listens", START_S)
    said = json.loads(file.read_text())
    assert said.keys() == {"pid", "created", "url", "urls", "host", "boot"}
    assert said["urls"] == [said["url"]]
    return said["url"]


def ends(process, seconds=30.0):
    """(exit code, its lines)"""
    _, errors = process.communicate(timeout=seconds)
    return process.returncode, errors.decode().splitlines()


def client(url):
    return httpx.Client(base_url=url, auth=BlockingProof(TOKEN), timeout=10.0, trust_env=False)


def message(replica, *arguments, **fields):
    """An ask of the configuration that `furnish` writes."""
    shared = config_hash(parse({"replicas": 2, "train": {"steps": 10}}))
    made = ask(replica, *arguments, **fields)
    return protocol.encode(protocol.QuorumRequest(made.report, made.ring, made.state, shared, made.layout))


def post(http, *arguments, **fields):
    response = http.post("/v1/quorum", content=message(*arguments, **fields))
    assert response.status_code == 200, response.text
    return protocol.decode(response.content, Grant, Continue, protocol.Wait)


def first_epoch(url):
    """Both replicas ask at once."""

    def one(replica):
        with client(url) as http:
            return post(http, replica)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(one, (0, 1))
    assert first == second
    return first


def replicas(http):
    return http.get("/v1/status").json()["replicas"]


def test_its_file_names_no_other_process_that_has_its_pid(run):
    """Where a container ended, the pid in the file may be that of any process of the host."""
    with lighthouse(run):
        said = read_json(run / "lighthouse.json")
        assert alive(said)
        assert not alive({**said, "pid": os.getppid()})


def test_after_sigkill_the_same_epoch_goes_on_in_a_higher_term(run):
    with lighthouse(run) as (process, url):
        grant = first_epoch(url)
        protocol.verify(worker_token(TOKEN), grant)
        with client(url) as http:
            assert post(http, 0, at(1, 1), epoch=1) == Continue(1, 2)
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    port = url.rsplit(":", 1)[1]
    with lighthouse(run, "--port", port) as (_, again):
        assert again == url
        with client(url) as http:
            status = http.get("/v1/status").json()
            assert status["epoch"] == 1
            assert status["term"] == grant.term + 1
            assert post(http, 1, at(1, 1), epoch=1, max_term=grant.term) == Continue(1, 2)
            for replica in (0, 1):
                assert post(http, replica, at(1, 2), epoch=1, max_term=grant.term) == Continue(1, 3)
            http.post("/v1/processes", content=protocol.encode(protocol.ProcessReport({0: name(0)}, (name(1),))))
            shrunk = post(http, 0, at(1, 2), epoch=1, after=1)
        assert (shrunk.term, shrunk.epoch, shrunk.ring) == (grant.term + 1, 2, (0,))
    rows = [json.loads(line) for line in (run / "lighthouse" / "events.jsonl").read_text().splitlines()]
    assert [r["event"] for r in rows if r["event"] != "Waiting"] == [
        *("LighthouseStarted", "EpochGranted", "LighthouseStarted", "ExitReported", "EpochGranted")
    ]
    assert all({"t", "event", "source", "reason"} <= r.keys() for r in rows)


@pytest.mark.multiproc
def test_sigterm_answers_open_long_polls_and_ends(run):
    with lighthouse(run) as (process, url):
        answers = []

        def poll():
            with client(url) as http:
                answers.append(post(http, 0))

        thread = threading.Thread(target=poll)
        thread.start()
        with client(url) as http:
            until(lambda: replicas(http)[0]["state"] == "asking")
        process.send_signal(signal.SIGTERM)
        code, lines = ends(process)
        assert code == 143, lines
        thread.join()
        assert [type(answer) for answer in answers] == [protocol.Wait]
        assert not [line for line in lines if "Traceback" in line or "ERROR" in line]


def test_it_writes_down_where_others_reach_it(run):
    with lighthouse(run, "--url", "http://job-lighthouse-0-0.job:29500") as (_, url):
        assert url == "http://job-lighthouse-0-0.job:29500"


def one_line(process, key):
    """It ended with 64 and one line on `key`."""
    code, lines = ends(process, START_S)
    assert code == 64, lines
    assert len(lines) == 1, lines
    assert lines[0].startswith(f"{key}: "), lines
    return lines[0]


def test_a_taken_port_is_one_line(run):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert str(port) in one_line(spawn(run, "--port", str(port)), "network.port")
    assert not (run / "lighthouse.json").exists()


def test_what_is_damaged_is_set_aside_and_the_lighthouse_serves(run):
    """Store, journal, log of events and lighthouse.json can all be made anew."""
    folder = run / "lighthouse"
    folder.mkdir()
    for file in ("store.sqlite", "journal.sqlite"):
        (folder / file).write_bytes(b"no database" * 500)
    for path in (folder / "events.jsonl", run / "lighthouse.json"):
        path.mkdir()
    with lighthouse(run) as (process, url):
        assert first_epoch(url).epoch == 1
        (run / "lighthouse.json").write_bytes(b"\xff{")
        until(lambda: (run / "lighthouse.json").read_bytes().startswith(b'{"pid": %d' % process.pid))
        with client(url) as http:
            shown = http.get("/v1/events?event=DamagedFileSetAside").json()["events"]
    asides = sorted(
        p.name.partition(".damaged-")[0] for p in [*folder.iterdir(), *run.iterdir()] if "damaged" in p.name
    )
    assert asides == ["events.jsonl", "journal.sqlite", "lighthouse.json", "store.sqlite"]
    assert [e["reason"].partition(":")[0] for e in shown] == ["store.sqlite", "journal.sqlite"]
    assert "DamagedFileSetAside" in (folder / "events.jsonl").read_text()


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ((), "arguments"),
        (("--run", "{}", "--port", "x"), "arguments"),
        (("--run", "{}", "--port", "70000"), "network.port"),
        (("--run", "{}", "--seat", "5"), "--seat"),
        (("--run", "{}/nowhere"), "config file"),
    ],
)
def test_bad_arguments_are_one_line(run, arguments, key, capsys):
    assert program.main([a.format(run) for a in arguments]) == 64
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{key}: ")


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_without_a_token_it_listens_on_loopback_only(host):
    with pytest.raises(ConfigError, match=r"network\.host: .* unless the run has a token"):
        address.listen(host, 0, known=False)
    address.listen("127.0.0.1", 0, known=False).close()
    with address.listen("0.0.0.0", 0, known=True) as sock:
        assert program.url(sock) == f"http://127.0.0.1:{sock.getsockname()[1]}"


def test_an_address_of_another_machine_is_one_line():
    for host in ("192.0.2.1", "no-such-host.invalid"):
        with pytest.raises(ConfigError, match=r"network\.host"):
            address.listen(host, 0, known=True)


def test_the_policy_is_the_configurations():
    config = parse(
        {"replicas": 4, "quorum": {"on_lost_head": "wait", "min_replicas": 2}, "timeouts": {"evict_s": 7}}
    )
    chosen = runtime.policy(config)
    assert (chosen.slots, chosen.min_replicas, chosen.evict_s) == (4, 2, 7.0)
    assert chosen.on_lost_head == "wait"
    assert runtime.policy(Config()).on_lost_head == "halt"
    assert runtime.policy(Config()).start_wait_s is None

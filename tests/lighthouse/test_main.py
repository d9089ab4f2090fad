import json
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from ft_hsdp import address, protocol
from ft_hsdp.config import Config, parse
from ft_hsdp.core.grant import Continue
from ft_hsdp.core.host_report import MachineRanks
from ft_hsdp.launch.run.directory import alive
from ft_hsdp.secret import worker_token
from lighthouse import __main__ as program
from lighthouse import runtime
from tests.support.lighthouse.lighthouse_helpers import TOKEN, at, name
from tests.support.lighthouse.program import Program, furnish
from tests.support.lighthouse.webhook import SECRET, webhook
from tests.support.refused import refused
from tests.support.waiting import until


@pytest.fixture
def run(tmp_path):
    """A run directory of two replicas."""
    return furnish(tmp_path / "job")


def test_its_file_names_no_other_process_that_has_its_pid(run):
    """Where a container ended, the pid in the file may be that of any process of the host."""
    with Program(run) as lighthouse:
        said = lighthouse.said
        assert said.keys() == {"pid", "start_ticks", "url", "urls", "host", "boot"}
        assert said["urls"] == [said["url"]]
        assert alive(said)
        assert not alive({**said, "pid": os.getppid()})


def test_after_sigkill_the_same_epoch_goes_on_in_a_higher_term(run):
    with Program(run) as first:
        grant = first.first_epoch()
        protocol.verify(worker_token(TOKEN), grant)
        assert first.answer(0, at(1, 1), epoch=1) == Continue(1, 2)
    with Program(run, "--port", first.url.rpartition(":")[2]) as again:
        assert again.url == first.url
        status = again.get("/v1/status")
        assert status["epoch"] == 1
        assert status["term"] == grant.term + 1
        assert again.answer(1, at(1, 1), epoch=1, max_term=grant.term) == Continue(1, 2)
        for replica in (0, 1):
            assert again.answer(replica, at(1, 2), epoch=1, max_term=grant.term) == Continue(1, 3)
        gone = protocol.ProcessReport(machine=MachineRanks(name(1), "here", 1, gone=True))
        again.http.post(f"{again.url}/v1/processes", content=protocol.encode(gone))
        shrunk = again.answer(0, at(1, 2), epoch=1, after=1)
        assert (shrunk.term, shrunk.epoch, shrunk.ring) == (grant.term + 1, 2, (0,))
    rows = [json.loads(line) for line in (run / "lighthouse" / "events.jsonl").read_text().splitlines()]
    assert [r["event"] for r in rows if r["event"] != "Waiting"] == [
        *("LighthouseStarted", "EpochGranted", "LighthouseStarted", "ExitReported", "EpochGranted")
    ]
    assert all({"t", "event", "source", "reason"} <= r.keys() for r in rows)


@pytest.mark.multiproc
def test_sigterm_answers_open_long_polls_and_ends(run):
    with Program(run) as lighthouse, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(lighthouse.answer, 0)
        until(lambda: lighthouse.get("/v1/status")["replicas"][0]["state"] == "asking")
        lighthouse.process.send_signal(signal.SIGTERM)
        code, lines = lighthouse.end()
        assert code == 143, lines
        assert isinstance(answer.result(), protocol.Wait)
        assert not [line for line in lines if "Traceback" in line or "ERROR" in line]


def test_it_writes_down_where_others_reach_it(run):
    with Program(run, "--url", "http://job-lighthouse-0-0.job:29500") as lighthouse:
        assert lighthouse.url == "http://job-lighthouse-0-0.job:29500"


def test_a_taken_port_is_one_line(run):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        code, (line,) = Program(run, "--port", str(port)).end()
    assert (code, line.partition(": ")[0], str(port) in line) == (64, "network.port", True), line
    assert not (run / "lighthouse.json").exists()


def test_what_is_damaged_is_set_aside_and_the_lighthouse_serves(run):
    """Store, journal, log of events and lighthouse.json can all be made anew."""
    folder = run / "lighthouse"
    folder.mkdir()
    for file in ("store.sqlite", "journal.sqlite"):
        (folder / file).write_bytes(b"no database" * 500)
    for path in (folder / "events.jsonl", run / "lighthouse.json"):
        path.mkdir()
    with Program(run) as lighthouse:
        assert lighthouse.first_epoch().epoch == 1
        (run / "lighthouse.json").write_bytes(b"\xff{")
        said = b'{"pid": %d' % lighthouse.process.pid
        until(lambda: (run / "lighthouse.json").read_bytes().startswith(said))
        shown = lighthouse.get("/v1/events?event=DamagedFileSetAside")["events"]
    asides = sorted(
        p.name.partition(".damaged-")[0] for p in [*folder.iterdir(), *run.iterdir()] if "damaged" in p.name
    )
    assert asides == ["events.jsonl", "journal.sqlite", "lighthouse.json", "store.sqlite"]
    assert [e["reason"].partition(":")[0] for e in shown] == ["store.sqlite", "journal.sqlite"]
    assert "DamagedFileSetAside" in (folder / "events.jsonl").read_text()


def test_people_are_told_once_whichever_lighthouse_leads(tmp_path):
    lost = {"event": "LogLinesLost", "file": "events.jsonl", "lines": 3}
    with webhook() as server:
        run = furnish(tmp_path / "job", alerts=[{"url": server.url}])
        for replica in (0, 1):
            with Program(run) as lighthouse:
                told = protocol.encode(protocol.Telemetry(f"{replica}-a-0", events=(lost,)))
                assert lighthouse.http.post(f"{lighthouse.url}/v1/telemetry", content=told).is_success
                until(lambda count=replica + 1: len(server.got) == count)
                assert server.got[replica]["page"] == lighthouse.url
                shown = [
                    lighthouse.http.get(f"{lighthouse.url}/v1/{page}").text for page in ("status", "overview")
                ]
                assert SECRET not in "".join([*shown, lighthouse.tail()])
    assert [each["subject"] for each in server.got] == ["logs of replica 0", "logs of replica 1"]


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
    refused(lambda: address.listen(host, 0, known=False), r"network\.host: .* unless the run has a token")
    address.listen("127.0.0.1", 0, known=False).close()
    with address.listen("0.0.0.0", 0, known=True) as sock:
        assert program.url(sock) == f"http://127.0.0.1:{sock.getsockname()[1]}"


def test_an_address_of_another_machine_is_one_line():
    for host in ("192.0.2.1", "no-such-host.invalid"):
        refused(lambda host=host: address.listen(host, 0, known=True), r"network\.host")


def test_the_policy_is_the_configurations():
    config = parse(
        {"replicas": 4, "quorum": {"on_lost_head": "wait", "min_replicas": 2}, "timeouts": {"evict_s": 7}}
    )
    chosen = runtime.policy(config)
    assert (chosen.slots, chosen.min_replicas, chosen.evict_s) == (4, 2, 7.0)
    assert chosen.on_lost_head == "wait"
    assert runtime.policy(Config()).on_lost_head == "halt"
    assert runtime.policy(Config()).start_wait_s is None

import json
import os
import re
import socket
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ft_hsdp.config import parse
from ft_hsdp.jsonl import replace_json
from ft_hsdp.launch.backend.processes import take_name
from ft_hsdp.launch.cli import main
from ft_hsdp.launch.doctor import CHECKS, Bad, CheckOutcome, CheckState, Subject, Undecided, examine
from ft_hsdp.launch.doctor.checks import Check
from ft_hsdp.launch.run.directory import RunDir
from ft_hsdp.launch.standalone import name_of_agent
from ft_hsdp.lifetime import identity
from ft_hsdp.secret import TOKEN_VARIABLE
from ft_hsdp.train.identity import host_name
from tests.support.answering import Answering, serving
from tests.support.certificates import Authority
from tests.support.launch.launch_helpers import DEADLINE_S

PAGE = (Path(__file__).parents[3] / "docs/doctor.md").read_text()


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A small job's file; relative paths lie in an empty folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_bytes(b"to be or not to be\n" * 5000)
    (tmp_path / "c.yaml").write_text("job: {name: job}\ndata: {path: text}\n")
    return "c.yaml"


def by_name(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert err == ""
    assert document.keys() == {"ok", "checks"}
    assert all(check.keys() == {"name", "ok", "state", "text"} for check in document["checks"])
    return {check["name"]: check for check in document["checks"]}


def test_a_job_that_can_start_passes_and_nothing_is_left(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(Path().rglob("*"))
    assert main(["doctor", config, "--json"]) == 0
    checks = by_name(capsys)
    assert {"config", "port", "hostname", "clock", "memory", "memfd", "files", "device"} <= checks.keys()
    assert all(check["ok"] for check in checks.values())
    assert checks["data"]["text"].startswith("95,000 tokens")
    assert sorted(Path().rglob("*")) == before


def test_what_fails_says_what_to_do_on_one_line_each(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", config, "--data.path=none", "--model.dim=65536", "--model.heads=64"]) == 64
    out, err = capsys.readouterr()
    lines = [line.split(maxsplit=2) for line in out.splitlines()]
    assert err == ""
    assert {mark for mark, _, _ in lines} <= {"ok", "FAIL", "?"}
    failed = {name: text for mark, name, text in lines if mark == "FAIL"}
    assert failed.keys() == {"data", "memory"}
    assert "data.path: got 'none'" in failed["data"]
    assert "use fewer replicas" in failed["memory"]


def test_it_looks_beside_a_running_job_of_another_name_only(config, capsys) -> None:
    run = RunDir(Path("runs/job"))
    replace_json(run.supervisor, identity())
    assert main(["doctor", config, "--json"]) == 64
    failed = [check["text"] for check in by_name(capsys).values() if not check["ok"]]
    assert len(failed) == 1
    assert "is taken by pid" in failed[0]
    assert main(["doctor", config, "--json", "--job.name=other"]) == 0


@pytest.mark.parametrize(
    ("argv", "said"),
    [(["--lighthouse", "nowhere"], "--lighthouse: got 'nowhere'"), (["--replicas=0"], "replicas: got 0")],
)
def test_arguments_that_cannot_be_used_get_one_line(config, capsys, argv, said) -> None:
    assert main(["doctor", config, *argv]) == 64
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert said in err


def test_what_hangs_is_undecided_and_holds_up_nobody() -> None:
    ended = threading.Event()

    def hang(_: Subject) -> str:
        ended.wait(DEADLINE_S)
        return "late"

    def fail(_: Subject) -> str:
        raise Bad("do this")

    def wonder(_: Subject) -> str:
        raise Undecided("who knows")

    def crash(_: Subject) -> str:
        raise KeyError("x")

    checks = [
        Check("hang", hang),
        Check("fail", fail),
        Check("wonder", wonder),
        Check("crash", crash),
        Check("other", hang, lambda _: False),
    ]
    found = examine(Subject(parse({})), checks=checks, deadline_s=0.2)
    ended.set()
    assert [(each.name, each.state, each.ok) for each in found] == [
        ("hang", CheckState.SKIP, True),
        ("fail", CheckState.FAIL, False),
        ("wonder", CheckState.SKIP, True),
        ("crash", CheckState.SKIP, True),
    ]
    assert "KeyError" in found[3].text


def test_the_page_has_a_row_for_every_check() -> None:
    assert re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE) == [check.name for check in CHECKS]


# Beside a lighthouse that is elsewhere.


class Elsewhere(Answering):
    """Answers with a clock that is `date`."""

    date: str | None = None
    send_response = Answering.send_response_only  # without a date of its own

    def do_GET(self) -> None:
        self.answer(200, headers={} if self.date is None else {"Date": self.date})


@pytest.fixture
def elsewhere() -> Iterator[str]:
    Elsewhere.date = None
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere)) as url:
        yield url


def found(name: str, subject: Subject) -> CheckOutcome:
    (finding,) = examine(subject, checks=[check for check in CHECKS if check.name == name])
    return finding


def test_its_port_is_not_looked_at_here(elsewhere: str) -> None:
    subject = Subject(parse({}), (elsewhere,))
    assert found("lighthouse", subject).state is CheckState.OK
    assert found("port", subject).state is CheckState.SKIP
    named = elsewhere.replace("127.0.0.1", "localhost")
    assert "127.0.0.1" in found("lighthouse", Subject(parse({}), (named,))).text


def test_what_the_lighthouse_alone_has_is_not_looked_at_beside_it(tmp_path: Path) -> None:
    certificate, _ = Authority(tmp_path).sign("server", "head")
    keys = {
        "network": {"tls_certificate": certificate, "tls_key": "none"},
        "lighthouse": {"etcd": ["http://[::1]:1"]},
    }
    looked = [check for check in CHECKS if check.name in ("tls", "etcd")]
    assert [each.ok for each in examine(Subject(parse(keys)), checks=looked)] == [False, False]
    there = Subject(parse(keys), ("https://head:1",))
    assert [(each.name, each.ok) for each in examine(there, checks=looked)] == [("tls", True)]


def test_one_that_does_not_answer_fails(elsewhere: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    gone = f"http://127.0.0.1:{port}"
    assert f"{gone} does not answer" in found("lighthouse", Subject(parse({}), (gone,))).text
    assert found("clock", Subject(parse({}), (gone,))).state is CheckState.SKIP
    assert found("lighthouse", Subject(parse({}), (gone, elsewhere))).ok
    nameless = found("lighthouse", Subject(parse({}), ("http://no-such-host.invalid:1",)))
    assert nameless.state is CheckState.FAIL
    assert "no-such-host.invalid" in nameless.text


def test_an_unknown_token_and_the_name_of_another_agent_fail(elsewhere: str, monkeypatch: Any) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "5e" * 16)
    subject = Subject(parse({}), (elsewhere,))
    assert TOKEN_VARIABLE in found("lighthouse", subject).text
    taken = take_name(name_of_agent("5e" * 16, host_name(os.environ)))
    assert taken is not None
    with taken:
        assert not found("name", subject).ok


@pytest.mark.parametrize(
    ("date", "state", "said"),
    [
        ("Sat, 01 Jan 2000 00:00:00 GMT", CheckState.FAIL, "s ahead of the lighthouse"),
        ("Fri, 01 Jan 2100 00:00:00 GMT", CheckState.FAIL, "s behind the lighthouse"),
        ("yesterday", CheckState.SKIP, "answer has no date"),
        (None, CheckState.SKIP, "answer has no date"),
    ],
)
def test_clocks_that_differ_are_found(elsewhere: str, date: str | None, state: CheckState, said: str) -> None:
    Elsewhere.date = date
    finding = found("clock", Subject(parse({}), (elsewhere,)))
    assert finding.state is state
    assert said in finding.text

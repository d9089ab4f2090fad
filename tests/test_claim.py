import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ft_hsdp import claim
from ft_hsdp.claim import Claim, FolderOwner
from ft_hsdp.errors import ConfigError, Retryable
from ft_hsdp.jsonl import here

MINE, OTHER = FolderOwner.of("mine", "a" * 64), FolderOwner.of("other", "b" * 64)
HOLDER = """
import sys, time
from pathlib import Path
from ft_hsdp.claim import Claim, FolderOwner
Claim(Path(sys.argv[1]), FolderOwner.of("other", "b" * 64)).take("key", "value", "allowed")
print("ready", flush=True)
sys.stdin.read()
"""


def take(folder: Path, owner: FolderOwner) -> Claim:
    return Claim(folder, owner).take("checkpoint.dir", str(folder), "a folder that no other running job has")


def holder(folder: Path, *before: str) -> subprocess.Popen[str]:
    """A process that has the claim, once it has said so."""
    command = [*before, sys.executable, "-c", HOLDER, str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def record(folder: Path) -> dict[str, object]:
    return dict(json.loads((folder / claim.FILE).read_text()))


def put(folder: Path, owner: FolderOwner, **facts: object) -> dict[str, object]:
    """The record of an owner on another host."""
    made = {
        "job": owner.job,
        "fingerprint": owner.fingerprint,
        "since": "2026",
        "pid": 7,
        "host": "far",
        "count": 1,
    }
    made |= {"boots": ["another"], **facts}
    (folder / claim.FILE).write_text(json.dumps(made))
    return made


@pytest.mark.parametrize("namespace", [False, True])
def test_a_living_owner_is_named_and_a_killed_one_has_no_say(tmp_path: Path, namespace: bool) -> None:
    before = ("unshare", "--pid", "--fork", "--kill-child") if namespace else ()
    if namespace and (not shutil.which("unshare") or subprocess.run([*before, "true"], check=False).returncode):
        pytest.skip("no pid namespaces here")
    with holder(tmp_path, *before) as process:
        with pytest.raises(
            ConfigError, match=r"checkpoint\.dir: .*job other has it since 20.*end that job"
        ) as caught:
            take(tmp_path, MINE)
        assert caught.value.exit_code == 64
        assert "b" * 64 not in (tmp_path / claim.FILE).read_text()
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        mine = take(tmp_path, MINE)
    assert record(tmp_path)["job"] == "mine"
    mine.release()
    take(tmp_path, OTHER).release()


def test_processes_of_one_job_share_it_and_the_last_one_gives_it_up(tmp_path: Path) -> None:
    first, second = take(tmp_path, MINE), take(tmp_path, MINE)
    first.release()
    with pytest.raises(ConfigError, match="job mine has it"):
        take(tmp_path, OTHER)
    second.release()
    take(tmp_path, OTHER).release()


def test_of_many_that_want_a_free_folder_one_has_it(tmp_path: Path) -> None:
    put(tmp_path, FolderOwner.of("dead", "c" * 64), boots=[here()["boot"]])
    (tmp_path / claim.LOCK).touch()  # as a dead owner leaves it: who is sure that it is dead does not wait
    got: list[Claim] = []
    refused: list[str] = []

    def one(number: int) -> None:
        try:
            got.append(take(tmp_path, FolderOwner.of(f"job{number}", "d" * 64)))
        except ConfigError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=one, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(got), len(refused)) == (1, 5)
    got[0].release()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"RENEW_S": 0.1, "LEASE_S": 2.0, "GIVEN_UP_S": 0.3, "LOOK_S": 0.02}.items():
        monkeypatch.setattr(claim, name, seconds)


@pytest.mark.usefixtures("impatient")
def test_an_owner_on_another_host_lives_while_it_renews(tmp_path: Path) -> None:
    made, ended = put(tmp_path, OTHER), threading.Event()

    def renew() -> None:
        while not ended.wait(0.05):
            put(tmp_path, OTHER, count=time.monotonic_ns())

    thread = threading.Thread(target=renew)
    thread.start()
    with pytest.raises(ConfigError, match="job other has it since 2026, pid 7 on far"):
        take(tmp_path, MINE)
    ended.set()
    thread.join()
    mine = take(tmp_path, MINE)  # its lease has ended: nobody had to remove anything
    assert record(tmp_path)["boots"] == [here()["boot"]]
    with claim.turn(tmp_path):
        (tmp_path / claim.FILE).write_text(json.dumps(made))  # the other one thaws
    with pytest.raises(Retryable, match="of another job now: job other"):
        mine.check()
    mine.release()
    assert record(tmp_path) == made, "who lost the claim writes no more"


@pytest.mark.usefixtures("impatient")
def test_a_claim_that_was_given_up_elsewhere_is_free_after_a_moment(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(claim, "LEASE_S", 3600.0)
    put(tmp_path, OTHER, given_up=True)
    take(tmp_path, MINE).release()


@pytest.mark.usefixtures("impatient")
def test_a_record_that_is_damaged_or_gone_is_written_again(tmp_path: Path) -> None:
    mine = take(tmp_path, MINE)
    for spoil in (Path.unlink, lambda f: f.write_bytes(b"\xff{"), lambda f: f.write_text("[]")):
        spoil(tmp_path / claim.FILE)
        with pytest.raises(ConfigError, match=r"job mine has it|another process has it"):
            take(tmp_path, OTHER)
    mine.release()


@pytest.mark.parametrize("spoil", [lambda f: f.write_text("[]"), lambda f: f.write_text("{"), os.mkfifo, os.mkdir])
def test_what_a_dead_owner_left_damaged_holds_up_nobody(tmp_path: Path, spoil: Callable[[Path], object]) -> None:
    spoil(tmp_path / claim.FILE)
    got: list[Claim] = []
    assert claim.judge(tmp_path, MINE) == ("", {})
    thread = threading.Thread(target=lambda: got.append(take(tmp_path, MINE)), daemon=True)
    thread.start()
    thread.join(20)
    assert got, "it tries for ever"
    assert record(tmp_path)["job"] == "mine"
    (tmp_path / claim.FILE).write_text(json.dumps({**record(tmp_path), "count": "many"}))
    got[0].release()
    assert record(tmp_path)["given_up"]

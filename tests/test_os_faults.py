import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ft_hsdp import fault_injection
from ft_hsdp.fault_injection import FaultOrder
from ft_hsdp.jsonl import LineWriter
from ft_hsdp.launch.chaos import Injection
from ft_hsdp.launch.run.directory import RunDir, write_json
from tests.support import os_faults
from tests.support.forced_faults import ME, Enforced, enforcing

ROOT = Path(__file__).parents[1]


@pytest.fixture
def force(tmp_path: Path) -> Iterator[Enforced]:
    with enforcing(tmp_path) as put:
        yield put


def test_a_full_disk_takes_nothing_below_the_run_and_everything_elsewhere(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, force: Enforced
) -> None:
    log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "file"
    force(FaultOrder("disk_full", ME))
    for write in (
        lambda: os.write(log, b"x"),
        lambda: (tmp_path / "new").write_text("x"),
        lambda: os.open(tmp_path / "made", os.O_WRONLY | os.O_CREAT),
    ):
        with pytest.raises(OSError, match="No space left on device") as caught:
            write()
        assert caught.value.errno == errno.ENOSPC
    elsewhere.write_text("x")
    assert os.read(os.open(tmp_path / "log", os.O_RDONLY | os.O_CREAT), 9) == b""
    force()
    assert os.write(log, b"x") == 1
    os.close(log)


def test_a_full_disk_takes_what_fits_into_the_last_block(tmp_path: Path, force: Enforced) -> None:
    log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(log, b"x" * 100)
    os.fsync(log)
    room = os.fstat(log).st_blocks * 512 - 100
    force(FaultOrder("disk_full", ME))
    assert os.write(log, b"y" * (room - 10)) == room - 10
    assert os.write(log, b"y" * 100) == 10, "a line is torn"
    with pytest.raises(OSError, match="No space left"):
        os.write(log, b"y")
    over = os.open(tmp_path / "log", os.O_WRONLY)
    assert os.write(over, b"z" * 100) == 100, "it needs no new block"
    os.close(over)
    os.close(log)


def test_a_full_disk_takes_no_output_either(tmp_path: Path) -> None:
    code = (
        "import contextlib, sys; from pathlib import Path; run = Path(sys.argv[1])\n"
        "from ft_hsdp.fault_injection import FaultOrder, enforce; import tests.support.os_faults\n"
        "print('before', flush=True)\n"
        "with contextlib.ExitStack() as faked:\n"
        "    enforce([FaultOrder('disk_full', 0)], run, 0, faked)\n"
        "    try:\n        print('lost', flush=True)\n    except OSError as error:\n        said = error.errno\n"
        "print(said, flush=True)\n"
    )
    with (tmp_path / "rank.log").open("w") as log:
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path.resolve())], stdout=log, check=True, timeout=60, cwd=ROOT
        )
    assert (tmp_path / "rank.log").read_text().split() == ["before", str(errno.ENOSPC)]


def test_a_slow_disk_takes_its_time(tmp_path: Path, force: Enforced, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    lines = LineWriter(tmp_path / "log.jsonl")
    force(FaultOrder("slow_disk", ME, seconds=0.3))
    monkeypatch.setattr(time, "sleep", slept.append)
    lines.write({"n": 1})
    lines.close()
    assert slept == [0.3]


def test_the_wall_clock_jumps_alone(force: Enforced) -> None:
    right, monotonic = time.time(), time.monotonic()
    force(FaultOrder("clock", ME, seconds=-3600.0))
    assert time.time() < right - 3000
    assert time.time_ns() < (right - 3000) * 1e9
    assert time.monotonic() >= monotonic
    force()
    assert time.time() >= right


def test_a_limit_of_descriptors_is_set_from_outside_and_lifted(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    code = "import time; print(1, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as victim:
        assert victim.stdout is not None
        victim.stdout.readline()
        ranks = [{"rank": 1, "pid": victim.pid, "state": "running"}]
        write_json(run.processes(0), {"replica": 0, "incarnation": "0-a-0", "restarts": 0, "ranks": ranks})
        before = psutil.Process(victim.pid).rlimit(psutil.RLIMIT_NOFILE)
        made = os_faults.inflict(run, Injection(0, 1, kind="descriptors"))
        soft, hard = psutil.Process(victim.pid).rlimit(psutil.RLIMIT_NOFILE)
        assert (soft, hard) == (3, before[1]), "0, 1 and 2 are open"
        assert made.event["kind"] == "descriptors"
        assert made.lifted("over")["event"] == "FailureLifted"
        assert psutil.Process(victim.pid).rlimit(psutil.RLIMIT_NOFILE) == before
        victim.kill()


def test_an_order_of_these_kinds_reaches_a_rank_by_the_same_file(tmp_path: Path, force: Enforced) -> None:
    made = os_faults.inflict(RunDir(tmp_path), Injection(ME, None, kind="clock", for_s=9.0), -3600.0)
    (file,) = (tmp_path / fault_injection.FOLDER).glob("*.json")
    order = fault_injection.parse(file.read_bytes())
    assert order.hits(ME, 1)
    right = time.time()
    force(order)
    assert time.time() < right - 3000
    force()
    made.lifted("over")
    assert not file.exists()

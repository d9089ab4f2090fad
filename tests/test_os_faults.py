import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ft_hsdp.fault_injection import FaultOrder
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


def test_the_wall_clock_jumps_alone(force: Enforced) -> None:
    right, monotonic = time.time(), time.monotonic()
    force(FaultOrder("clock", ME, seconds=-3600.0))
    assert time.time() < right - 3000
    assert time.time_ns() < (right - 3000) * 1e9
    assert time.monotonic() >= monotonic
    force()
    assert time.time() >= right

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ft_hsdp.fault_injection import FaultOrder
from tests.support.forced_faults import ME, Enforced, enforcing


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


def test_the_wall_clock_jumps_alone(force: Enforced) -> None:
    right, monotonic = time.time(), time.monotonic()
    force(FaultOrder("clock", ME, seconds=-3600.0))
    assert time.time() < right - 3000
    assert time.time_ns() < (right - 3000) * 1e9
    assert time.monotonic() >= monotonic
    force()
    assert time.time() >= right

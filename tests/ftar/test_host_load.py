from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ft_hsdp.ftar.heartbeat import HostLoadReader, is_stopped

QUIET = "some avg10=0.00 avg60=0.00 avg300=0.00 total={}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"


def write(proc: Path, waited_us: int, stolen: int, runnable: int) -> None:
    (proc / "pressure").mkdir(exist_ok=True)
    (proc / "pressure/cpu").write_text(QUIET.format(waited_us))
    (proc / "stat").write_text(f"cpu  100 0 100 {800 - stolen} 0 0 0 {stolen} 0 0\ncpu0 1 2 3\n")
    (proc / "loadavg").write_text(f"9.11 6.86 3.34 {runnable}/162 22888\n")


def test_what_a_reading_says_is_of_the_time_since_the_last_one(tmp_path: Path) -> None:
    reader = HostLoadReader(tmp_path, cores=2)
    write(tmp_path, 5_000_000, 0, 9)
    first = reader.read(10.0)
    assert (first.pressure, first.stolen, first.runnable) == (0.0, 0.0, 4.5)
    (tmp_path / "pressure/cpu").write_text(QUIET.format(5_250_000))
    (tmp_path / "stat").write_text("cpu  150 0 100 825 0 0 0 25 0 0\n")
    second = reader.read(10.5)
    assert second.pressure == pytest.approx(0.5)
    assert second.stolen == pytest.approx(0.25)


@pytest.mark.parametrize(
    "text", ["", "some", "some total=\n", "some total=x", "full total=5\n", "\x00\xff", "cpu  1 2"]
)
def test_a_file_that_is_missing_or_strange_counts_as_a_quiet_host(tmp_path: Path, text: str) -> None:
    (tmp_path / "pressure").mkdir()
    for name in ("pressure/cpu", "stat", "loadavg"):
        (tmp_path / name).write_text(text)
    reader = HostLoadReader(tmp_path, cores=2)
    for now in (1.0, 1.0, 2.0):
        assert reader.read(now).stall_s == 0.0
    assert HostLoadReader(tmp_path / "none", cores=2).read(3.0).stall_s == 0.0


def test_this_host_can_be_read() -> None:
    reader = HostLoadReader()
    reader.read(1.0)
    assert 0.0 <= reader.read(2.0).pressure <= 1.0


def test_a_stopped_process_is_told_from_one_that_runs() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert not is_stopped(child.pid)
        os.kill(child.pid, signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert is_stopped(child.pid)
    finally:
        child.kill()
        child.communicate()
    assert not is_stopped(child.pid), "nothing can be said of a process that is gone"

"""Sensors of a rank: what hangs or fails lacks, and the rest is told."""

import math
import os
import threading
from pathlib import Path

import psutil
import pytest

from ft_hsdp import protocol
from ft_hsdp.control import sensors
from ft_hsdp.control.sensors import KEPT_S, REPEAT_S, Sensors
from ft_hsdp.protocol import MAX_COUNT, RankBeat, Telemetry
from lighthouse.overview.machines import MEASURES
from tests.support.waiting import until

NVML = """
class NVMLError(Exception): pass
class Used: used, total, gpu = 7, 9, 50
class Xid: eventData = 79
xids = [Xid]
NVML_TEMPERATURE_GPU, nvmlEventTypeXidCriticalError = 0, 8
def nvmlInit(): pass
def nvmlDeviceGetHandleByPciBusId(address): return address
def nvmlEventSetCreate(): return "set"
def nvmlDeviceRegisterEvents(device, kind, events): assert (device, kind, events) == (b"0000:3b:00.0", 8, "set")
def nvmlEventSetWait_v2(events, milliseconds):
    if not xids: raise NVMLError("timeout")
    return xids.pop()
def nvmlDeviceGetMemoryInfo(device): return Used
def nvmlDeviceGetPowerUsage(device): raise NVMLError("not supported")
def nvmlDeviceGetTemperature(device, sensor): return -3
def nvmlDeviceGetUtilizationRates(device): return Used
"""


def test_a_sensor_that_hangs_or_fails_lacks_and_the_others_go_on() -> None:
    now, go, end, looks = [100.0], threading.Event(), threading.Event(), list[float]()

    def counts() -> dict[str, float]:
        looks.append(now[0])
        return {"rank_cpu_ratio": 2 * now[0]}

    def hangs() -> dict[str, float]:
        if go.is_set():
            end.wait()
        return {"hung": 1.0}

    def fails() -> dict[str, float]:
        raise OSError("stale file handle")

    found = Sensors([hangs, fails, lambda: {"steady": 4.0}, counts], lambda: now[0], 0.001)
    try:
        until(lambda: found.newest() == {"hung": 1.0, "steady": 4.0, "rank_cpu_ratio": 0.0}, "the first values")
        go.set()
        before = len(looks)
        now[0] += KEPT_S
        until(lambda: len(looks) > before + 3 and "hung" not in found.newest(), "the hung one is forgotten")
        assert found.newest()["steady"] == 4.0
    finally:
        end.set()
        found.close()
    until(lambda: not [t for t in threading.enumerate() if t.name.startswith("sensor ")], "all threads have ended")
    now[0] += REPEAT_S
    assert found.newest() == {}, "nothing is new"


def test_a_rate_is_what_was_counted_in_a_second() -> None:
    now = [50.0]

    def counts() -> dict[str, float]:
        now[0] += 2.0
        return {"host_sent_bytes_per_second": 2.0**54 + 100.0 * now[0], "host_run_free_bytes": 5.0}

    found = Sensors([counts], lambda: now[0], 0.001)
    until(lambda: found.newest() == {"host_sent_bytes_per_second": 100.0, "host_run_free_bytes": 5.0}, "the rate")
    found.close()


def test_whatever_is_measured_its_beat_can_be_read() -> None:
    measured = {"efs": 2.0**63, "cold": -3.0, "endless": math.inf, "odd": math.nan, "rank_cpu_ratio": math.nan}
    found = Sensors([lambda: measured], every_s=0.001)
    until(lambda: found.newest() == {"efs": MAX_COUNT, "cold": 0.0}, "what can be told")
    beat = Telemetry("0-x-0", ranks=(RankBeat(0, 1, "here", 2, load=found.newest()),))
    found.close()
    assert protocol.decode(protocol.encode(beat), Telemetry) == beat


def test_the_values_are_those_of_this_process_and_this_machine(tmp_path: Path) -> None:
    found = dict[str, float]()
    for sensor in sensors.of_rank("", {"run": tmp_path, "checkpoint": tmp_path / "not" / "there"}):
        found |= sensor()
    stat = os.statvfs(tmp_path)
    assert found["host_run_free_bytes"] == pytest.approx(stat.f_bavail * stat.f_frsize, rel=0.2)
    assert found["rank_resident_bytes"] == pytest.approx(psutil.Process().memory_info().rss, rel=0.5)
    assert found.keys() == {name for name in MEASURES if not name.startswith("gpu")}
    assert len(sensors.of_rank("0000:3b:00.0", None)) == 1, "there is no pynvml here"


def test_what_the_driver_of_a_gpu_does_not_know_is_left_out(tmp_path, monkeypatch) -> None:
    (tmp_path / "pynvml.py").write_text(NVML)
    monkeypatch.syspath_prepend(tmp_path)
    _, gpu = sensors.of_rank("0000:3b:00.0", None)
    known = {"gpu_memory_used_bytes": 7, "gpu_memory_bytes": 9, "gpu_utilization_ratio": 0.5, "gpu_xid": 79}
    assert [gpu(), gpu()] == [{**known, "gpu_temperature_celsius": -3}] * 2
    assert gpu().keys() < MEASURES.keys()

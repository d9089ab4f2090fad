"""What a rank uses of its machine, and what that has left: measured every 15 s, and told with the signs of life.

Each sensor has a thread, for which nothing waits. One that fails or hangs, because a file server is dead or the
driver of a GPU does not answer, lacks in what is told; the others go on. `lighthouse.overview.machines` has the
names of all values.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from ft_hsdp.mounts import existing
from ft_hsdp.protocol import MAX_COUNT

EVERY_S = 15.0
KEPT_S = 40.0  # a value that is older is not told
REPEAT_S = 3.0  # for so long new values are told: a sign of life may be lost
# Of these a sensor returns how much there was altogether; what is told is how much there was in a second.
RATES = ("rank_cpu_ratio", "host_received_bytes_per_second", "host_sent_bytes_per_second")

Sensor = Callable[[], Mapping[str, float]]
_log = logging.getLogger(__name__)


class Sensors:
    """The newest values of several sensors, each of which may block or raise; ``clock`` is monotonic."""

    def __init__(
        self, sensors: Iterable[Sensor], clock: Callable[[], float] = time.monotonic, every_s: float = EVERY_S
    ) -> None:
        self._clock, self._every_s = clock, every_s
        self._found: dict[int, tuple[float, Mapping[str, float]]] = {}  # by sensor: when, and what
        self._over = threading.Event()
        for about in enumerate(sensors):
            threading.Thread(target=self._run, args=about, name=f"sensor {about[0]}", daemon=True).start()

    def newest(self) -> dict[str, float]:
        """Return what is known now; {}: nothing new. Does not block."""
        now, found = self._clock(), list(self._found.values())
        if not any(now - t < REPEAT_S for t, _ in found):
            return {}
        return {name: value for t, values in found if now - t < KEPT_S for name, value in values.items()}

    def close(self) -> None:
        """End the threads that do not hang, without a wait."""
        self._over.set()

    def _run(self, number: int, sensor: Sensor) -> None:
        at, before, told = 0.0, dict[str, float](), False
        while not self._over.is_set():
            values: dict[str, float] = {}
            try:
                values = {name: float(value) for name, value in sensor().items()}
            except Exception as error:  # a library may raise anything
                if not told:
                    _log.warning("not measured: %s: %s", type(error).__name__, error)
                told = True
            now, counts = self._clock(), {name: values.pop(name) for name in RATES if name in values}
            for name in counts.keys() & before.keys():
                values[name] = (counts[name] - before[name]) / max(now - at, 1e-3)
            # Another number makes the whole message invalid; AWS EFS reports 2^63 free bytes.
            valid = {name: min(max(0.0, v), MAX_COUNT) for name, v in values.items() if math.isfinite(v)}
            self._found[number], at, before = (now, valid), now, counts
            self._over.wait(self._every_s)


def of_rank(gpu: str, folders: Mapping[str, Path | str | None] | None) -> list[Sensor]:
    """Return the sensors of a rank, its GPU at a PCI address ("": none), and its host, with room in folders."""
    found: list[Sensor] = [_used]
    if folders is not None:
        rooms = [partial(_room, name, Path(folder)) for name, folder in folders.items() if folder]
        found = [lambda: {**_used(), **_host()}, *rooms]
    if gpu and importlib.util.find_spec("pynvml") is not None:
        found.append(partial(next, _gpu(gpu)))
    return found


def _used() -> dict[str, float]:
    return {"rank_cpu_ratio": time.process_time(), "rank_resident_bytes": psutil.Process().memory_info().rss}


def _host() -> dict[str, float]:
    cards = [card for name, card in psutil.net_io_counters(pernic=True).items() if name != "lo"]
    memory = psutil.virtual_memory()
    return {
        "host_memory_bytes": memory.total,
        "host_memory_available_bytes": memory.available,
        "host_received_bytes_per_second": sum(card.bytes_recv for card in cards),
        "host_sent_bytes_per_second": sum(card.bytes_sent for card in cards),
    }


def _room(name: str, folder: Path) -> dict[str, float]:
    stat = os.statvfs(existing(folder))
    return {f"host_{name}_free_bytes": stat.f_bavail * stat.f_frsize}


def _gpu(address: str) -> Iterator[dict[str, float]]:
    """Yield what NVML says of a GPU, each time anew; what the driver does not know is left out."""
    nvml: Any = importlib.import_module("pynvml")
    nvml.nvmlInit()
    device, errors, xid = nvml.nvmlDeviceGetHandleByPciBusId(address.encode()), nvml.nvmlEventSetCreate(), 0
    with contextlib.suppress(nvml.NVMLError):
        nvml.nvmlDeviceRegisterEvents(device, nvml.nvmlEventTypeXidCriticalError, errors)
    reads: dict[str, Callable[[], float]] = {
        "gpu_memory_used_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(device).used,
        "gpu_memory_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(device).total,
        "gpu_power_watts": lambda: nvml.nvmlDeviceGetPowerUsage(device) / 1000,
        "gpu_temperature_celsius": lambda: nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU),
        "gpu_utilization_ratio": lambda: nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100,
    }
    while True:
        found: dict[str, float] = {}
        for name, read in reads.items():
            with contextlib.suppress(nvml.NVMLError):
                found[name] = read()
        with contextlib.suppress(nvml.NVMLError):  # there is no other one
            for _ in range(100):
                xid = nvml.nvmlEventSetWait_v2(errors, 0).eventData
        yield {**found, "gpu_xid": xid}

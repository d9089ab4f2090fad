"""torchft's Manager in the same situation, at its defaults and tuned."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import TracebackType

from ft_hsdp.bench.plan import Log, Row
from ft_hsdp.bench.recovery.herd import PATIENCE_S, TICK_S
from ft_hsdp.bench.recovery.kills import QUIET_STEPS, SEED
from ft_hsdp.bench.recovery.reckon import Kill, stall
from ft_hsdp.bench.recovery.scene import Scene
from ft_hsdp.bench.recovery.spans import span
from ft_hsdp.bench.roster import version
from ft_hsdp.bench.spread import milliseconds
from ft_hsdp.errors import Retryable
from ft_hsdp.launch.processes import environment, last_line, tied
from ft_hsdp.launch.rundir import Tailer, read_json


@dataclass(frozen=True, slots=True)
class Setting:
    """Times of its lighthouse in milliseconds (none: its defaults), and the part of all kills that it gets."""

    times: tuple[int, ...]
    text: str
    kills: int


SETTINGS: Mapping[str, Setting] = {
    "defaults": Setting((), "heartbeat_timeout 5 s, join_timeout 60 s", 3),
    "tuned": Setting((1000, 100), "heartbeat_timeout 1 s, join_timeout 0.1 s", 10),
}


def peer(scene: Scene, most: int, log: Log) -> list[Row]:
    """A row for each setting, with at most `most` kills; none, and a note, where torchft is not installed."""
    if version("torchft") is None:
        log.note("torchft is left out: not installed")
        return []
    rows = []
    for name, setting in SETTINGS.items():
        with _Flock(scene, setting) as flock:
            rows.append({"setting": name, "text": setting.text, **_hunt(flock, min(most, setting.kills))})
        log.say(f"torchft, {name}: next commit less one step, p50 {rows[-1]['less_one']['p50_ms']:.4g} ms")
    return rows


def _hunt(flock: _Flock, count: int) -> Row:
    chance = random.Random(SEED)
    everybody = flock.scene.replicas
    made: list[Kill] = []
    for _ in range(count):
        flock.whole()
        time.sleep(chance.uniform(0, flock.scene.wait_s))
        made.append(flock.kill(chance.randrange(everybody)))
        flock.without(made[-1])
        flock.start(made[-1].replica)
    rows = flock.rows
    step_s = flock.step_s()
    found = []
    for kill in made:
        others = {n: each for n, each in rows.items() if n != kill.replica}
        cost = stall(kill, others, lambda row: row["participants"] < everybody, step_s)
        if cost is not None:
            found.append(cost)
    return {
        "replicas": everybody,
        "kills": len(made),
        "step_ms": milliseconds(step_s),
        "next": span([cost.next_s for cost in found]),
        "less_one": span([cost.less_one_s for cost in found]),
        "stall": span([cost.stall_s for cost in found]),
    }


class _Flock:
    """A context: a lighthouse and the replicas of a loop of its Manager."""

    def __init__(self, scene: Scene, setting: Setting) -> None:
        self.scene = scene
        self.rows: dict[int, list[Row]] = {n: [] for n in range(scene.replicas)}
        self._setting = setting
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> _Flock:
        with ExitStack() as stack:
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ft-hsdp-bench-")))
            stack.callback(self._end)
            self._tailers = {n: Tailer(self._file(n)) for n in self.rows}
            at = self._folder / "lighthouse.json"
            times = map(str, self._setting.times)
            self._spawn(-1, "ft_hsdp.bench.contenders.torchft_lighthouse", str(at), *times)
            self._until(lambda: read_json(at) is not None, "torchft's lighthouse listens")
            self._url = str(read_json(at)["url"])
            for n in self.rows:
                self.start(n)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def start(self, n: int) -> None:
        """Start a replica, for the first time or again."""
        scene = self.scene
        seat = {
            "replica": n,
            "layers": scene.layers,
            "elements": scene.elements,
            "wait_s": scene.wait_s,
            "file": str(self._file(n)),
            "lighthouse": self._url,
        }
        self._spawn(n, "ft_hsdp.bench.contenders.torchft_loop", json.dumps(seat))

    def kill(self, n: int) -> Kill:
        """SIGKILL a replica."""
        made = Kill(time.time(), n, 0)
        self._running[n].send_signal(signal.SIGKILL)
        self._running.pop(n).wait()
        return made

    def whole(self) -> None:
        """Wait until all have taken part in some steps in a row."""

        def there(rows: list[Row]) -> bool:
            newest = rows[-QUIET_STEPS:]
            return len(newest) == QUIET_STEPS and all(r["participants"] == len(self.rows) for r in newest)

        self._until(lambda: all(map(there, self.rows.values())), "all replicas take part")

    def without(self, kill: Kill) -> None:
        """Wait until the others have committed a step without the victim."""

        def gone(row: Row) -> bool:
            return bool(row["t"] > kill.t and row["participants"] < len(self.rows))

        others = [rows for n, rows in self.rows.items() if n != kill.replica]
        self._until(lambda: all(any(map(gone, rows[-20:])) for rows in others), "the survivors commit")

    def step_s(self) -> float:
        """The median time between two commits of one replica with everybody."""
        spans = [
            after["t"] - before["t"]
            for rows in self.rows.values()
            for before, after in pairwise(rows)
            if before["participants"] == after["participants"] == len(self.rows)
            and after["step"] == before["step"] + 1
        ]
        return median(spans)

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            for n, process in self._running.items():
                if process.poll() is not None:
                    raise Retryable(f"bench: torchft's replica {n} ended before {what}: {last_line(self._log(n))}")
            if time.monotonic() > deadline:
                raise Retryable(f"bench: not within {PATIENCE_S:g} s: {what}")
            time.sleep(TICK_S)
            for n, tailer in self._tailers.items():
                self.rows[n] += tailer.poll()

    def _spawn(self, n: int, *module_and_args: str) -> None:
        with self._log(n).open("ab") as log:
            self._running[n] = subprocess.Popen(
                tied(*module_and_args), env=environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _file(self, n: int) -> Path:
        return self._folder / f"{n}.jsonl"

    def _log(self, n: int) -> Path:
        return self._folder / f"{n}.log"

    def _end(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()

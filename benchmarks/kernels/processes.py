"""Rings whose members are processes that stage through shared pinned memory.

One of the members may be killed.
"""

from __future__ import annotations

import json
import os
import queue
import random
import subprocess
import sys
import threading
import time
from typing import Any

from benchmarks.kernels.ring import DEAD, WORDS, PinnedSegment, RingMemoryLayout

START_S = 240.0  # imports, CUDA and the first compilation, all at once
RUN_S = 60.0


class SegmentTeam:
    """Worker processes that share one pinned segment."""

    def __init__(
        self, device: str, members: int, elements: int, chunk_bytes: int, slots: int, repeat: int
    ) -> None:
        self.layout = RingMemoryLayout(members, chunk_bytes, slots)
        self.segment = PinnedSegment(self.layout.nbytes)
        os.set_inheritable(self.segment.fd, True)
        task = {
            "device": device, "members": members, "elements": elements, "chunk_bytes": chunk_bytes,
            "slots": slots, "repeat": repeat, "seed": random.randrange(2**31), "fd": self.segment.fd,
            "timeout_s": 20.0,
        }  # fmt: skip
        self.heard: queue.SimpleQueue[tuple[int, dict[str, Any]]] = queue.SimpleQueue()
        self.workers = [self._start(task | {"position": i}) for i in range(members)]
        for i in range(members):
            threading.Thread(target=self._listen, args=(i,), daemon=True).start()

    def _start(self, task: dict[str, Any]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.kernels.worker", json.dumps(task)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=(self.segment.fd,),
        )  # fmt: skip

    def _listen(self, position: int) -> None:
        stdout = self.workers[position].stdout
        assert stdout is not None
        for line in stdout:
            self.heard.put((position, json.loads(line)))
        self.heard.put((position, {"gone": True}))

    def collect(self, key: str, of: set[int], seconds: float) -> dict[int, dict[str, Any]]:
        """Return the first line with `key` of each worker in `of`; block until all have come.

        Raises:
            RuntimeError: a worker has ended without it, or it took longer than `seconds`.
        """
        found: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + seconds
        while found.keys() != of:
            try:
                position, line = self.heard.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise RuntimeError(f"members {of - found.keys()} did not say {key!r} in {seconds} s") from None
            if key in line and position in of:
                found[position] = line
            elif "gone" in line and position in of - found.keys():
                raise RuntimeError(f"member {position} ended without {key!r}")
        return found

    def go(self) -> None:
        """Let all workers begin."""
        for worker in self.workers:
            assert worker.stdin is not None
            worker.stdin.write("go\n")
            worker.stdin.flush()

    def kill(self, position: int) -> float:
        """Kill one worker and mark it dead for all, as a control plane would; return when (monotonic seconds)."""
        self.workers[position].kill()
        now = time.monotonic()
        for i in range(self.layout.members):
            self.layout.words(self.segment.bytes, i)[WORDS * DEAD] = 1
        return now

    def close(self) -> None:
        """Kill the workers that still run, and free the segment."""
        for worker in self.workers:
            worker.kill()
            worker.wait()
            for stream in (worker.stdin, worker.stdout):
                assert stream is not None
                stream.close()
        self.segment.close()


def ring(device: str, members: int, elements: int, chunk_bytes: int, slots: int, repeat: int) -> dict[str, Any]:
    """Run `repeat` all-reduces of fresh data, each checked by all members."""
    team = SegmentTeam(device, members, elements, chunk_bytes, slots, repeat)
    try:
        everyone = set(range(members))
        team.collect("ready", everyone, START_S)
        team.go()
        ended = team.collect("finished", everyone, RUN_S)
    finally:
        team.close()
    return {
        "ok": all(line["ok"] for line in ended.values()), "members": members, "mib": elements / 2**18,
        "ms": max(line["ms"] for line in ended.values()),
    }  # fmt: skip


def kill(device: str, members: int, elements: int, chunk_bytes: int, slots: int) -> dict[str, Any]:
    """Kill one member during the work, and measure how long until all others have ended their kernels."""
    team = SegmentTeam(device, members, elements, chunk_bytes, slots, 10**6)
    try:
        everyone = set(range(members))
        team.collect("ready", everyone, START_S)
        team.go()
        team.collect("done", everyone, RUN_S)
        victim = random.randrange(members)
        killed = team.kill(victim)
        ended = team.collect("broken", everyone - {victim}, RUN_S)
    finally:
        team.close()
    return {
        "ok": all(line["ok"] for line in ended.values()), "members": members,
        "ms": [1e3 * (line["at"] - killed) for line in ended.values()],
    }  # fmt: skip

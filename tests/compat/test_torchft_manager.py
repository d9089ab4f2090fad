"""docs/examples/torchft_loop.py with a real lighthouse of torchft: one of two replicas is killed and returns.

By the transport of torchft, and by ours.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torchft.coordination import LighthouseServer

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "torchft_loop.py"
LINE = re.compile(r"step (\d+) replicas (\d+) loss [\d.]+ (\w+)")
LOUD = f"""
import functools, runpy, sys, torchft
from ft_hsdp.compat.torchft import StateTransport

class Loud(StateTransport):
    def recv_checkpoint(self, src_rank, metadata, step, timeout):
        state = super().recv_checkpoint(src_rank, metadata, step, timeout)
        print(f"healed at {{step}}", flush=True)
        return state

torchft.Manager = functools.partial(torchft.Manager, checkpoint_transport=Loud(host="127.0.0.1"))
runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
"""
WITHIN_S = 60.0


class Replica:
    def __init__(self, program: list[str], number: int, lighthouse: str, directory: Path) -> None:
        self.log = directory / f"{number}-{time.monotonic_ns()}.log"
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, *program, str(number), "--steps", "100000", "--pause", "0.02"],
                env={**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse, "PYTHONPATH": str(ROOT)},
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def steps(self) -> dict[int, tuple[int, str]]:
        """Replicas and digest of the weights by committed step."""
        return {int(s): (int(n), digest) for s, n, digest in LINE.findall(self.log.read_text())}

    def until(self, replicas: int, steps: int = 3) -> int:
        """Wait for ``steps`` more steps with so many replicas; the last one."""
        deadline = time.monotonic() + WITHIN_S
        begin = max(self.steps(), default=0)
        while True:
            new = [s for s, (n, _) in self.steps().items() if s > begin and n == replicas]
            if len(new) >= steps:
                return max(new)
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < deadline, self.log.read_text()[-3000:]
            time.sleep(0.02)


@pytest.fixture
def lighthouse() -> Iterator[str]:
    server = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=200, quorum_tick_ms=20, heartbeat_timeout_ms=1000
    )
    yield server.address()
    server.shutdown()


@pytest.mark.proof
@pytest.mark.multiproc
@pytest.mark.parametrize("program", [[str(EXAMPLE)], ["-c", LOUD]], ids=["example", "StateTransport"])
def test_a_replica_of_torchfts_manager_is_killed_and_comes_back(program, lighthouse, tmp_path) -> None:
    replicas = [Replica(program, i, lighthouse, tmp_path) for i in range(2)]
    try:
        survivor, victim = replicas
        survivor.until(2)
        victim.process.send_signal(signal.SIGKILL)
        victim.process.wait(WITHIN_S)
        survivor.until(1)
        returned = Replica(program, 1, lighthouse, tmp_path)
        replicas.append(returned)
        last = returned.until(2, steps=10)
        survivor.until(2, steps=1)
        ours, theirs, old = survivor.steps(), returned.steps(), victim.steps()
        assert len([s for s in theirs if s in ours]) >= 10
        assert all(ours[s] == theirs[s] for s in theirs if s in ours), "the weights differ"
        assert all(ours[s][1] == old[s][1] for s in old if s in ours)
        assert list(ours) == list(range(min(ours), max(ours) + 1)), "the survivor missed a step"
        assert min(theirs) > max(old)
        healed = [int(step) for step in re.findall(r"healed at (\d+)", returned.log.read_text())]
        assert bool(healed) == ("-c" in program)
        assert min(theirs) > max(healed, default=0)
        assert last > 10
    finally:
        for replica in replicas:
            replica.process.kill()
            replica.process.wait(WITHIN_S)

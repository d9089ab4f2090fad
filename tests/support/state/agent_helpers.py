"""State agents as processes, and what ranks write into them."""

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from ft_hsdp.core.state_id import StateId
from ft_hsdp.state.agent.client import StateAgent
from ft_hsdp.state.agent.messages import KeepCopy, Settle
from ft_hsdp.state.transfer import shard_manifest
from tests.support.known import get

TOKEN = os.environ.get("FT_HSDP_TOKEN") or secrets.token_hex(32)  # two runs of the tests do not meet
NBYTES = 300_001
LAYOUT = shard_manifest.fingerprint(())
DEADLINE_S = 20.0


def state(step: int) -> StateId:
    return StateId(1, step, f"{step:032x}")


def content(step: int, rank: int = 0, nbytes: int = NBYTES) -> np.ndarray:
    return np.random.default_rng((step, rank)).integers(0, 256, nbytes, dtype=np.uint8)


def header(step: int, rank: int = 0, ranks: int = 2, nbytes: int = NBYTES) -> bytes:
    """The header of `content`."""
    made = shard_manifest.ShardManifest(state(step), rank, ranks, LAYOUT, nbytes, (), (step,), ({"lr": 0.1},))
    return shard_manifest.encode(shard_manifest.seal(made, content(step, rank, nbytes).data))


def connect(
    replica: int = 0, rank: int = 0, nbytes: int = NBYTES, deadline_s: float = DEADLINE_S, host: str = ""
) -> StateAgent:
    return StateAgent.connect(TOKEN, replica, rank, 2, nbytes, deadline_s, host)


def order(
    step: int,
    address: str,
    rank: int = 0,
    nbytes: int = NBYTES,
    *,
    replica: int = 0,
    ranks: int = 2,
    layout: str = LAYOUT,
    deadline_s: float = DEADLINE_S,
    budget: int | None = None,
) -> KeepCopy:
    """To keep a copy of a shard of `content` that the state server at ``address`` has, or will have."""
    about = shard_manifest.ExpectedShard(state(step), rank, ranks, layout, nbytes)
    return KeepCopy(about, (address,), deadline_s, budget, replica)


def write(agent: StateAgent, step: int, rank: int = 0, settle: bool = True) -> None:
    array = agent.stage(state(step))
    assert array is not None, agent.busy
    array[:] = content(step, rank, len(array))
    agent.staged(state(step), header(step, rank, nbytes=len(array)))
    if settle:
        agent.order(Settle(state(step), True))


def steps(agent: StateAgent) -> list[int]:
    return [held.state.step for held in agent.list()]


@dataclass(frozen=True)
class Running:
    process: subprocess.Popen[str]
    address: str

    def ask(self, step: int, rank: int, what: str) -> tuple[int, bytes]:
        held = state(step)
        path = f"/v1/state/{held.commit_epoch}/{held.step}/{held.lineage}/{rank}/{what}"
        return get(self.address, path, TOKEN)[:2]

    def serves(self, step: int, rank: int = 0) -> bool:
        """Whether it serves a state, manifest and data, bit for bit."""
        status, encoded = self.ask(step, rank, "manifest")
        if status == 404:
            return False
        assert status == 200
        manifest = shard_manifest.decode(encoded)
        assert (manifest.state, manifest.rank, manifest.cursors) == (state(step), rank, (step,))
        status, data = self.ask(step, rank, "data")
        assert status == 200
        assert data == content(step, rank, manifest.nbytes).tobytes()
        assert manifest.checksums == shard_manifest.checksums(memoryview(data))
        return True


def command(replica: int, *more: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "ft_hsdp.state.agent.server",
        "--replica",
        str(replica),
        "--host",
        "127.0.0.1",
        *more,
    ]


def environment() -> dict[str, str]:
    return {**os.environ, "FT_HSDP_TOKEN": TOKEN}


@contextmanager
def agent(replica: int, *more: str) -> Iterator[Running]:
    """A state agent, until the end of the block."""
    process = subprocess.Popen(command(replica, *more), env=environment(), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert ready["pid"] == process.pid
        yield Running(process, ready["address"])
    finally:
        process.kill()
        process.wait(DEADLINE_S)
        process.stdout.close()

"""A rank with a state: `python -m ft_hsdp.bench.recovery.local_rank SEAT`, orders on stdin, answers on stdout.

    -> keep      <- {"stage_s": 0.1, "save_s": 0.2, "digest": "..."}   into the state agent, and as safetensors
    -> agent     <- {"seconds": 0.1, "digest": "..."}                  from the state agent
    -> file      <- {"seconds": 0.1, "digest": "..."}                  from the safetensors file

Both ways end with the values in the tensors of a rank that has just been started.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from safetensors.torch import load_file, save_file
from torch import Tensor

from ft_hsdp.core.state_id import StateId
from ft_hsdp.state.agent.client import StateAgent
from ft_hsdp.state.transfer import shard_manifest
from ft_hsdp.state.transfer.shard_manifest import ShardManifest

STATE = StateId(1, 1, "0" * 32)
TENSORS = 32
DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True)
class LocalSeat:
    """token: of the agent; nbytes: of the state; file: the safetensors file; seed: of the values."""

    token: str
    nbytes: int
    file: str
    seed: int


class LocalRank:
    """Holds the state in tensors of about equal size."""

    def __init__(self, seat: LocalSeat) -> None:
        self._seat = seat
        whole = seat.nbytes // 4
        sizes = [whole // TENSORS + (n < whole % TENSORS) for n in range(TENSORS)]
        self.state = {f"{n:02}": torch.zeros(size) for n, size in enumerate(sizes)}
        for tensor in self.state.values():
            tensor.fill_(1.0)  # every page is there

    def obey(self, order: str) -> dict[str, Any]:
        """Carry out one order, and return its result."""
        if order == "keep":
            return self._keep()
        start = time.monotonic()
        if order == "agent":
            self._from_agent()
        else:
            self._from_file()
        return {"seconds": time.monotonic() - start, "digest": self._digest()}

    def _keep(self) -> dict[str, Any]:
        random = torch.Generator().manual_seed(self._seat.seed)
        for tensor in self.state.values():
            tensor.uniform_(generator=random)
        agent = self._connect()
        start = time.monotonic()
        memory = agent.stage(STATE)
        assert memory is not None
        at = 0
        for tensor in self.state.values():
            part = _bytes(tensor)
            memory[at : at + len(part)] = part
            at += len(part)
        agent.staged(STATE, shard_manifest.encode(shard_manifest.seal(_header(self._seat.nbytes), memory.data)))
        agent.mark_settled(STATE)
        staged = time.monotonic()
        save_file(self.state, self._seat.file)
        return {"stage_s": staged - start, "save_s": time.monotonic() - staged, "digest": self._digest()}

    def _from_agent(self) -> None:
        agent = self._connect()
        (held,) = [h for h in agent.list() if h.settled]
        taken = agent.acquire(held.state)
        assert taken is not None
        memory, _ = taken
        at = 0
        for tensor in self.state.values():
            part = _bytes(tensor)
            part[:] = memory[at : at + len(part)]
            at += len(part)

    def _from_file(self) -> None:
        loaded = load_file(self._seat.file)
        for name, tensor in self.state.items():
            tensor.copy_(loaded[name])

    def _connect(self) -> StateAgent:
        return StateAgent.connect(self._seat.token, 0, 0, 1, self._seat.nbytes, DEADLINE_S)

    def _digest(self) -> str:
        total = xxhash.xxh3_128()
        for tensor in self.state.values():
            total.update(_bytes(tensor))
        return total.hexdigest()


def _header(nbytes: int) -> ShardManifest:
    return ShardManifest(STATE, 0, 1, shard_manifest.fingerprint(()), nbytes, (), (), ())


def _bytes(tensor: Tensor) -> Any:
    """The tensor's bytes, uint8 [nbytes]."""
    array: Any = tensor.view(torch.uint8).numpy()
    return array


def main(argv: Sequence[str]) -> None:
    """Obey until stdin is closed."""
    torch.set_num_threads(1)
    rank = LocalRank(LocalSeat(**json.loads(argv[0])))
    sys.stdout.write("{}\n")
    sys.stdout.flush()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(rank.obey(line.strip())) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])

"""A rank with a state: `python -m ft_hsdp.bench.recovery.local_rank FD SPEC`.

    -> {"do": "keep"}      <- {"stage_s": 0.1, "save_s": 0.2, "digest": "..."}   into the state agent, and a file
    -> {"do": "agent"}     <- {"seconds": 0.1, "digest": "..."}                  from the state agent
    -> {"do": "file"}      <- {"seconds": 0.1, "digest": "..."}                  from the safetensors file

Both ways end with the values in the tensors of a rank that has just been started.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import xxhash
from safetensors.torch import load_file, save_file

from ft_hsdp.bench.workers.link import Answer, Obey, run_worker
from ft_hsdp.core.state_id import StateId
from ft_hsdp.secret import TOKEN_VARIABLE
from ft_hsdp.state.agent.client import StateAgent
from ft_hsdp.state.transfer import shard_manifest
from ft_hsdp.state.transfer.shard_manifest import ShardManifest

STATE = StateId(1, 1, "0" * 32)
TENSORS = 32
DEADLINE_S = 30.0


class LocalRank:
    """Holds the state in tensors of about equal size."""

    def __init__(self, nbytes: int, file: str, seed: int) -> None:
        self._nbytes = nbytes
        self._file = file
        self._seed = seed  # of the values
        whole = nbytes // 4
        sizes = [whole // TENSORS + (n < whole % TENSORS) for n in range(TENSORS)]
        self.state = {f"{n:02}": torch.ones(size) for n, size in enumerate(sizes)}  # every page is there

    def obey(self, command: Mapping[str, Any]) -> Answer:
        """Do one thing; return the answer."""
        if command["do"] == "keep":
            return self._keep()
        start = time.monotonic()
        if command["do"] == "agent":
            self._from_agent()
        else:
            self._from_file()
        return {"seconds": time.monotonic() - start, "digest": self._digest()}

    def _keep(self) -> Answer:
        random = torch.Generator().manual_seed(self._seed)
        for tensor in self.state.values():
            tensor.uniform_(generator=random)
        agent = self._connect()
        start = time.monotonic()
        memory = agent.stage(STATE)
        assert memory is not None
        for part, place in self._parts():
            memory[place] = part
        manifest = ShardManifest(STATE, 0, 1, shard_manifest.fingerprint(()), self._nbytes, (), (), ())
        agent.staged(STATE, shard_manifest.encode(shard_manifest.seal(manifest, memory.data)))
        agent.mark_settled(STATE)
        staged = time.monotonic()
        save_file(self.state, self._file)
        return {"stage_s": staged - start, "save_s": time.monotonic() - staged, "digest": self._digest()}

    def _from_agent(self) -> None:
        agent = self._connect()
        (held,) = [h for h in agent.list() if h.settled]
        taken = agent.acquire(held.state)
        assert taken is not None
        memory, _ = taken
        for part, place in self._parts():
            part[:] = memory[place]

    def _from_file(self) -> None:
        loaded = load_file(self._file)
        for name, tensor in self.state.items():
            tensor.copy_(loaded[name])

    def _connect(self) -> StateAgent:
        return StateAgent.connect(os.environ[TOKEN_VARIABLE], 0, 0, 1, self._nbytes, DEADLINE_S)

    def _digest(self) -> str:
        total = xxhash.xxh3_128()
        for part, _ in self._parts():
            total.update(part)
        return total.hexdigest()

    def _parts(self) -> Iterator[tuple[Any, slice]]:
        """Yield the bytes of each tensor, uint8, and their place where all tensors are in a row."""
        at = 0
        for tensor in self.state.values():
            part = tensor.view(torch.uint8).numpy()
            yield part, slice(at, at + len(part))
            at += len(part)


def set_up() -> tuple[Answer, Obey]:
    """Allocate the tensors of the state."""
    torch.set_num_threads(1)
    return {}, LocalRank(**json.loads(sys.argv[2])).obey


if __name__ == "__main__":
    run_worker(set_up)

"""Rendezvous: how the ranks of one `configure` find each other through torchft's store.

Two rounds, in which each rank writes one key and reads all. First: the secret of its communicator and the largest
epoch that it claimed. The secret of whoever claimed most is kept, for most edges are between its holders; the new
epoch is one larger than all. Then: the member and its address.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch.distributed import Store

SHORTEST_S, LONGEST_S = 0.0002, 0.003  # between two looks: a wait of the store itself cannot be cancelled


@dataclass(frozen=True, slots=True)
class Ring:
    """The ring of ``epoch``: (member, "host:port") by rank."""

    epoch: int
    members: tuple[tuple[int, str], ...]


class Rendezvous:
    """One `configure` of ``size`` ranks over ``store``, whose prefix nobody used before.

    It takes ``timeout_s`` at most, and ends early when ``cancelled`` is set.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float, cancelled: threading.Event) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._cancelled = cancelled

    def meet(self, token: str, epoch: int, admit: Callable[[str], tuple[int, str]]) -> Ring:
        """Agree on secret, epoch and members; ``admit`` gets the secret and says which (member, address) this is.

        Raises:
            RuntimeError: a rank did not come in time, wrote nonsense, or the rendezvous was cancelled.
        """
        claims = self._exchange("claim", [epoch, token], (int, str))
        floor = max(claim[0] for claim in claims)
        secret = next(claim[1] for claim in claims if claim[0] == floor)
        places = self._exchange("place", list(admit(secret)), (int, str))
        return Ring(floor + 1, tuple((member, address) for member, address in places))

    def _exchange(self, name: str, mine: list[int | str], shape: tuple[type, type]) -> list[tuple[int, str]]:
        self._store.set(f"{name}/{self._rank}", json.dumps(mine))
        return [self._read(f"{name}/{rank}", rank, shape) for rank in range(self._size)]

    def _read(self, key: str, rank: int, shape: tuple[type, type]) -> tuple[int, str]:
        pause = SHORTEST_S
        while not self._store.check([key]):
            if self._cancelled.is_set():
                raise RuntimeError("aborted: the rendezvous was cancelled")
            if time.monotonic() > self._deadline:
                late = f"timeout after {self._timeout_s * 1e3:.0f}ms"
                raise RuntimeError(f"rank {rank} of {self._size} did not come to the store: {late}")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_S)
        said = self._store.get(key)
        try:
            value = json.loads(said)
        except ValueError:
            value = None
        if not isinstance(value, list) or tuple(map(type, value)) != shape:
            raise RuntimeError(f"rank {rank} wrote {said[:60]!r} under {key}; allowed: a number and a text")
        return value[0], value[1]


def own_address(store_host: str, store_port: int) -> str:
    """The IPv4 address of this machine from which the store is reached, so that others may call it.

    Raises:
        OSError: the store has no IPv4 address.
    """
    family, kind, _, _, address = socket.getaddrinfo(store_host, store_port, socket.AF_INET, socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as sock:
        sock.connect(address)  # sends nothing: asks for the route
        return str(sock.getsockname()[0])

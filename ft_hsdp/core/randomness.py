"""Random numbers and orders that depend on a place alone.

`stream` derives a seed for each use from the job's, so that no generator is part of a state. `Permutation` draws
the order of a pass over the data without a table.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

_ROUNDS = 6
_MASK = 2**64 - 1


def stream(seed: int, use: str, *place: object) -> int:
    """Return a 63-bit seed.

    Args:
        seed: The job's.
        use: What it is for; at most 8 letters.
        *place: Where it is used.
    """
    text = "/".join(map(str, (seed, *place)))
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=f"ft_hsdp.{use}".encode()).digest()
    return int.from_bytes(digest, "little") >> 1


class Permutation:
    """A bijection on range(n), drawn by (seed, turn): a Feistel network with cycle walking.

    Memory does not grow with n, and a place costs a few microseconds. The same arguments give the same
    permutation on every machine.
    """

    def __init__(self, n: int, seed: int, turn: int) -> None:
        """Draw the permutation ``turn`` of ``seed``.

        Args:
            n: Of how many things.
            seed: Of all permutations.
            turn: Which of them.

        Raises:
            ValueError: ``n`` is less than 1.
        """
        if n < 1:
            raise ValueError(f"a permutation of {n} things: n must be at least 1")
        self.n = n
        self._half = max(1, (max(n - 1, 1).bit_length() + 1) // 2)
        self._low = (1 << self._half) - 1
        digest = hashlib.blake2b(
            f"{seed}/{turn}/{n}".encode(), digest_size=8 * _ROUNDS, person=b"ft_hsdp.permute"
        ).digest()
        self._keys = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(_ROUNDS)]

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        """Yield where 0, 1, ... go."""
        return map(self.__getitem__, range(self.n))

    def __getitem__(self, place: int) -> int:
        """Return where ``place`` goes.

        Raises:
            IndexError: It is outside 0..n-1.
        """
        return self._walk(place, self._encrypt)

    def index(self, place: int) -> int:
        """Return what goes to ``place``: the inverse.

        Raises:
            IndexError: It is outside 0..n-1.
        """
        return self._walk(place, self._decrypt)

    def _walk(self, place: int, go: Callable[[int], int]) -> int:
        """Walk a cycle of the network, which permutes 0..4^half-1 (below 4n+4), to the next value below n.

        Raises:
            IndexError: ``place`` is outside 0..n-1.
        """
        if not 0 <= place < self.n:
            raise IndexError(f"{place} is not in 0..{self.n - 1}")
        while (place := go(place)) >= self.n:
            pass
        return place

    def _encrypt(self, value: int) -> int:
        left, right = value >> self._half, value & self._low
        for key in self._keys:
            left, right = right, left ^ (mix64(right ^ key) & self._low)
        return left << self._half | right

    def _decrypt(self, value: int) -> int:
        left, right = value >> self._half, value & self._low
        for key in reversed(self._keys):
            left, right = right ^ (mix64(left ^ key) & self._low), left
        return left << self._half | right


def mix64(x: int) -> int:
    """Return 64 bits that depend on all of ``x``, the finalizer of splitmix64.

    Args:
        x: From 0 to 2**64 - 1.
    """
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)

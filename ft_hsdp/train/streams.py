"""Streams of random numbers: a seed for each use, derived from the job's, so that no generator is part of a state.

Whatever is random about a batch depends on its place in the data alone: a replica that feeds it again, or another
one that feeds it instead, draws the same numbers.
"""

from __future__ import annotations

import hashlib


def stream(seed: int, use: str, *place: object) -> int:
    """The 63-bit seed of ``use`` (at most 8 letters) at ``place``."""
    text = "/".join(map(str, (seed, *place)))
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=f"ft_hsdp.{use}".encode()).digest()
    return int.from_bytes(digest, "little") >> 1

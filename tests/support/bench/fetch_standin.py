"""A donor whose state is not what its receiver expects."""

from __future__ import annotations

from benchmarks.state_fetch import FetchSpec, RawDonor


class WrongDonor(RawDonor):
    def __init__(self, spec: FetchSpec) -> None:
        super().__init__(spec)
        self._buffer.bytes[-1] ^= 1

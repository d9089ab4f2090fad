"""A donor whose state is not what its receiver expects."""

from __future__ import annotations

from ft_hsdp.bench.fetch.ours import RawDonor
from ft_hsdp.bench.fetch.seat import Seat


class WrongDonor(RawDonor):
    """One bit is another."""

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat)
        self._room.bytes[-1] ^= 1

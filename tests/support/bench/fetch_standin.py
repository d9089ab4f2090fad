"""A donor whose state is not what its receiver expects."""

from __future__ import annotations

from ft_hsdp.bench.contenders.fetch import FetchSeat, RawDonor


class WrongDonor(RawDonor):
    """One bit is another."""

    def __init__(self, seat: FetchSeat) -> None:
        super().__init__(seat)
        self._room.bytes[-1] ^= 1

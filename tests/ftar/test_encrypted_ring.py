from collections.abc import Iterator

import pytest

from ft_hsdp import record_layer
from tests.support.ftar.ring_helpers import Ring


@pytest.fixture(autouse=True)
def _on() -> Iterator[None]:
    record_layer.use("on")
    yield
    record_layer.use("auto")


@pytest.mark.parametrize("members", [2, 3])
async def test_an_encrypted_ring_sums_and_forms_again(members: int, monkeypatch: pytest.MonkeyPatch) -> None:
    agreed: list[record_layer.Sealed] = []
    agree = record_layer.Sealed.agree

    def counted(sock: record_layer.Sealed, context: bytes = b"") -> None:
        agree(sock, context)
        agreed.append(sock)

    monkeypatch.setattr(record_layer.Sealed, "agree", counted)
    async with Ring(*range(members), transport="tcp") as ring:
        await ring.form(1)
        for n in (1, 100, 10_000):
            await ring.check(1, n=n)
        assert len(agreed) == 2 * members, "both ends of each data connection"
        await ring.form(2, ring.peers[1:] if members == 3 else None)
        await ring.check(2, ring.peers[1:] if members == 3 else None)

"""The token: who has it comes in, whatever else the header says."""

from __future__ import annotations

import hmac

import pytest
from lighthouse_helpers import TOKEN

from lighthouse.auth import Bearer


@pytest.mark.parametrize("header", [f"Bearer {TOKEN}", f"bearer {TOKEN}", f"Bearer  {TOKEN} "])
def test_the_token_lets_in(header):
    assert Bearer(TOKEN).knows(header)


@pytest.mark.parametrize(
    "header",
    [
        *(None, "", "Bearer", "Bearer ", TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN[:-1]}", f"Bearer {TOKEN}0"),
        *(f"Bearer {TOKEN} {TOKEN}", f"Bearer {TOKEN.upper()}", "Bearer \udcff\xe9"),
    ],
)
def test_anything_else_does_not(header):
    assert not Bearer(TOKEN).knows(header)


def test_digests_are_compared_in_constant_time(monkeypatch):
    compared = []
    real = hmac.compare_digest

    def spy(a, b):
        compared.append((a, b))
        return real(a, b)

    monkeypatch.setattr(hmac, "compare_digest", spy)
    for credential in ("x", "y" * 1000, TOKEN):
        Bearer(TOKEN).knows(f"Bearer {credential}")
    assert [(len(a), len(b)) for a, b in compared] == [(32, 32)] * 3
    assert TOKEN.encode() not in {side for pair in compared for side in pair}


def test_without_a_token_everybody_may_come_in():
    assert Bearer("").knows(None)

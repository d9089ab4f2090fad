from __future__ import annotations

import io
import json

import pytest

from ft_hsdp.bench import goals, tls
from ft_hsdp.bench.command import TlsOptions
from ft_hsdp.bench.results import MIB
from ft_hsdp.bench.tables import show


def row(plain: float, sealed: float) -> dict[str, object]:
    return {
        "members": 2,
        "bytes": 64 * MIB,
        "contenders": {"plain": {"p50_ms": plain}, "encrypted": {"p50_ms": sealed}},
    }


def test_the_goals_are_shares_of_the_plain_speed() -> None:
    found = goals.tls({"ring": [row(20, 50)], "fetch": [row(100, 250)]})
    assert [(each.seen, each.met) for each in found] == [(0.4, True), (0.4, False)]


@pytest.mark.multiproc
@pytest.mark.proof
def test_both_are_measured_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "MESSAGE", MIB)
    result = tls.run(TlsOptions(1, 16 * MIB), io.StringIO())
    assert json.loads(json.dumps(result))["cipher"]["gb_per_s"].keys() == {"seal", "open"}
    for name in ("ring", "fetch"):
        assert result[name][0]["contenders"].keys() == {"plain", "encrypted"}
    out = io.StringIO()
    show("tls", result, out)
    assert "AES-128-GCM" in out.getvalue()

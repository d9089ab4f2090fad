from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.state_fetch import CONTENDERS
from ft_hsdp.launch.cli import main

pytestmark = [pytest.mark.multiproc, pytest.mark.usefixtures("_nothing_left")]


@pytest.mark.proof
def test_all_contenders_in_one_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delitem(CONTENDERS, "torchft-4")  # processes that take seconds to start
    argv = ["bench", "fetch", "--json", "--measure", "large", "--sizes", "5MiB", "--rounds", "2"]
    assert main(argv) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert len(out.splitlines()) == 1
    (row,) = result["large"]
    assert (row["bytes"], row["tensors"]) == (5 << 20, 16)
    assert set(row["contenders"]) == {"raw", "fetch", "torchft"}
    assert {each["count"] for each in row["contenders"].values()} == {2}
    assert len(result["goals"]) == 2
    raw, fetch = (row["contenders"][name]["p50_ms"] for name in ("raw", "fetch"))
    assert result["goals"][0]["seen"] == pytest.approx(raw / fetch, abs=0.001)
    assert "\nlarge:\nbytes: 5242880\n" in err


def test_what_is_received_is_compared(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in CONTENDERS.keys() - {"raw"}:
        monkeypatch.delitem(CONTENDERS, name)
    monkeypatch.setitem(
        CONTENDERS, "raw", replace(CONTENDERS["raw"], donor="tests.support.bench.bench_standin:WrongDonor")
    )
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    assert main(["bench", "fetch", "--sizes", "1MiB", "--rounds", "1"]) == 75
    out, err = capsys.readouterr()
    assert out == ""
    assert "DataCorruption" in err.splitlines()[-1]

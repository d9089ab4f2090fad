from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ft_hsdp.bench import state_fetch
from ft_hsdp.bench.state_fetch import CONTENDERS
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


def test_the_best_setting_of_torchft_counts() -> None:
    times = {"fetch": 1.0, "raw": 0.9, "torchft": 9.0, "torchft-4": 8.0}
    row = {"bytes": 1, "contenders": {name: {"p50_ms": ms} for name, ms in times.items()}}
    assert [(v.seen, v.met) for v in state_fetch.goals({"large": [row]})] == [(0.9, True), (8.0, True)]


def test_what_is_received_is_compared(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in CONTENDERS.keys() - {"raw"}:
        monkeypatch.delitem(CONTENDERS, name)
    monkeypatch.setitem(
        CONTENDERS, "raw", replace(CONTENDERS["raw"], donor="tests.support.bench.fetch_standin:WrongDonor")
    )
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    assert main(["bench", "fetch", "--sizes", "1MiB", "--rounds", "1"]) == 75
    out, err = capsys.readouterr()
    assert out == ""
    assert "DataCorruption" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--measure", "speed"], "--measure: got 'speed'"),
        (["--sizes", "3"], "--sizes: got '3'"),
        (["--sizes", "1MiB,4GiB"], "--sizes: got '4 GiB'"),
        (["--rounds", "0"], "--rounds: got 0"),
    ],
)
def test_bad_arguments_get_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argv: list[str], said: str
) -> None:
    monkeypatch.setattr(state_fetch, "COPIES", 10**6)  # no machine has memory for that
    assert main(["bench", "fetch", *argv]) == 64
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert said in err

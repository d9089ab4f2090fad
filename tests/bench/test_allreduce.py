from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.allreduce import CONTENDERS, Contender
from benchmarks.command import KIB
from ft_hsdp.launch.cli import main

pytestmark = [pytest.mark.multiproc, pytest.mark.usefixtures("_nothing_left")]

STAND_IN = "tests.support.bench.bench_standin:StandIn"


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers find the stand-in."""
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


def standin(monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """Let the stand-in take part."""
    monkeypatch.setitem(CONTENDERS, "standin", Contender(STAND_IN, "", options))


@pytest.mark.proof
def test_contenders_sum_right_and_one_json_document_has_their_ratios(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    standin(monkeypatch)
    monkeypatch.setitem(CONTENDERS, "ghost", Contender("none:None", "", needs="no-such-package"))
    names = ",".join(CONTENDERS)
    argv = ["bench", "ftar", "--json", "--members", "2", "--sizes", "4KiB,8MiB", "--rounds", "2"]
    assert main([*argv, "--contenders", names]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert len(out.splitlines()) == 1
    assert [note for note in result["notes"] if "ghost" in note and "no-such-package" in note]
    assert [(row["members"], row["bytes"]) for row in result["bandwidth"]] == [(2, 4 * KIB), (2, 8192 * KIB)]
    for row in result["bandwidth"]:
        assert {*row["contenders"]} == {*CONTENDERS} - {"ghost"}
        times = row["contenders"]
        assert {found["count"] for found in times.values()} == {2}
        assert all(0 < found["min_ms"] <= found["p50_ms"] <= found["max_ms"] for found in times.values())
        wanted = times["gloo"]["p50_ms"] / times["standin"]["p50_ms"]
        assert row["times_as_fast"]["standin"]["gloo"] == pytest.approx(wanted, abs=0.001)
    assert [goal["text"].split()[0] for goal in result["goals"]] == ["tcp", "shm", "c10d"]
    assert result["versions"]["torch"]
    assert result["machine"]["tcp_congestion_default"]
    assert "\nbandwidth:\nmembers: 2\n" in err


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("wrong", "standin rank 1 has a wrong sum"),
        ("dies", "standin rank 1 died"),
        ("fails", "standin rank 1 failed: ZeroDivisionError: on demand"),
    ],
)
def test_what_goes_wrong_ends_the_bench_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fault: str, said: str
) -> None:
    standin(monkeypatch, fault=fault)
    argv = ["bench", "ftar", "--json", "--members", "2", "--sizes", "4KiB", "--contenders", "standin"]
    assert main(argv) == 75
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err.splitlines()[-1]
    assert "Traceback" not in err

from __future__ import annotations

import sys
from importlib import import_module
from inspect import signature

import pytest

from ft_hsdp.bench.command import BENCHES
from ft_hsdp.launch.cli import main


@pytest.mark.parametrize("path", BENCHES.values())
def test_a_bench_takes_its_options_and_where_progress_goes(path: str) -> None:
    module = import_module(path)
    needed = [p.name for p in signature(module.run).parameters.values() if p.default is p.empty]
    assert len(needed) == 2
    assert needed[1] == "stream"
    assert [*signature(module.options).parameters] == ["args"]


def test_a_bench_of_the_repository_is_named_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "benchmarks", None)
    for name in [each for each in sys.modules if each.startswith("benchmarks.")]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["bench", "units"]) == 64
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert "launcher.py bench units" in err


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        *[(f"bench ftar --measure {each}", f"bench rings --measure {each}") for each in ("kill", "reconfigure")],
        ("bench ftar --measure link", "bench link"),
        ("bench overhead --measure link", "bench link"),
        ("bench overhead --measure ray", "bench ray"),
        ("bench overhead --measure snapshot", "bench snapshot"),
        ("bench fetch --measure small", "docs/measurements.md"),
        *[(f"bench recovery --measure {each}", f"bench {each}") for each in ("return", "readers", "local")],
        ("bench recovery --rounds 3", "bench readers and bench local"),
        ("bench recovery --sizes 1MiB", "bench local"),
        ("bench memory --measure flips", "bench flips"),
        *[(f"bench memory --measure {each}", "docs/measurements.md") for each in ("none", "plan", "gaps", "step")],
        *[(f"bench {each} --measure spin", "docs/measurements.md") for each in ("ftar", "rings")],
        ("bench recovery --measure rejoin", "docs/measurements.md"),
        ("bench width", "bench lone, bench losses"),
        *[(f"bench width --measure {each}", f"bench {each}") for each in ("lone", "losses")],
        *[(f"bench {each}", "docs/measurements.md") for each in ("strangers", "tls", "driver")],
        ("chaos run --kind clock --by-s 3", "preload: [tests.support.os_faults]"),
        ("chaos run --kind slow_disk --delay-s 1", "preload: [tests.support.os_faults]"),
    ],
)
def test_what_is_gone_names_its_replacement(words: str, instead: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 64
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert instead in err

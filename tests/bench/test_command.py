from __future__ import annotations

import sys
from importlib import import_module
from inspect import signature

import pytest

from benchmarks import state_fetch
from benchmarks.command import BENCHES
from ft_hsdp.launch import arguments
from ft_hsdp.launch.cli import main


def test_the_command_line_knows_all_benches() -> None:
    assert tuple(BENCHES) == arguments.BENCHES


@pytest.mark.parametrize("name", BENCHES.values())
def test_a_bench_takes_its_options_and_where_progress_goes(name: str) -> None:
    module = import_module(f"benchmarks.{name}")
    needed = [p.name for p in signature(module.run).parameters.values() if p.default is p.empty]
    assert len(needed) == 2
    assert needed[1] == "stream"
    assert [*signature(module.options).parameters] == ["args"]


def test_a_wheel_says_where_the_benches_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "benchmarks", None)
    for name in [each for each in sys.modules if each.startswith("benchmarks.")]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["bench", "memory"]) == 64
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert "python launcher.py bench memory" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("ftar --measure speed", "--measure: got 'speed'"),
        ("ftar --sizes 64KiB,3", "--sizes: got '64KiB,3'"),
        ("ftar --sizes 8GiB", "--sizes: got '8GiB'"),
        ("ftar --members 1", "--members: got '1'"),
        ("ftar --contenders nobody", "--contenders: got 'nobody'"),
        ("ftar --rounds 0", "--rounds: got 0"),
        ("ftar --rounds many", "--rounds"),
        ("ftar --sizes 4GiB --members 16", "--sizes: got '4 GiB'"),
        ("recovery --measure bandwidth", "--measure: got 'bandwidth'"),
        ("recovery --kills 0", "--kills: got 0"),
        ("overhead --measure kill", "--measure: got 'kill'"),
        ("quorum --members 65", "--members: got '65'"),
        ("quorum --members 2,x", "--members: got '2,x'"),
        ("memory --measure gap", "lost, union"),
        ("fetch --measure speed", "--measure: got 'speed'"),
        ("fetch --sizes 3", "--sizes: got '3'"),
        ("fetch --sizes 1MiB,4GiB", "--sizes: got '4 GiB'"),
    ],
)
def test_bad_arguments_get_one_line(
    words: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(state_fetch, "COPIES", 10**6)  # no machine has memory for that
    assert main(["bench", *words.split()]) == 64
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert said in err

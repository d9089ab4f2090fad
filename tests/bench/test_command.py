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
    assert "in the repository: python launcher.py bench units" in err

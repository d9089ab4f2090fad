from __future__ import annotations

from importlib import import_module
from inspect import signature

import pytest

from ft_hsdp.bench.command import BENCHES


@pytest.mark.parametrize("name", BENCHES)
def test_a_bench_takes_its_options_and_where_progress_goes(name: str) -> None:
    run = import_module(f"ft_hsdp.bench.{BENCHES[name][0]}").run
    needed = [p.name for p in signature(run).parameters.values() if p.default is p.empty]
    assert len(needed) == 2
    assert needed[1] in ("stream", "log")

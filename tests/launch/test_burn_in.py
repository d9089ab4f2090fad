"""What a machine finds wrong with itself before it joins (`hosts.check`)."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ft_hsdp.config import dump, parse
from ft_hsdp.launch import burn_in

FLIP = {"failpoints": {"check-flip": {"replicas": [0], "step": 0}}}


@pytest.mark.parametrize(
    ("debug", "folder", "found"),
    [
        ({}, "", ""),
        (FLIP, "", "products of cpu: 1 of 4194304 values are wrong: number 3 is"),
        ({}, "not there", "disk of "),
    ],
)
async def test_a_machine_that_computes_or_stores_something_else_is_found(
    tmp_path: Path, debug: Any, folder: str, found: str
) -> None:
    config = parse({"hosts": {"check": 0.001}, "debug": debug})
    (tmp_path / "job.yaml").write_text(dump(config))
    said = await burn_in.failure(config, tmp_path / "job.yaml", tmp_path / folder)
    assert said.startswith(f"hosts.check: {found}" if found else "")
    assert bool(said) == bool(found)
    assert "\n" not in said


async def test_a_check_that_crashes_or_hangs_has_failed(tmp_path: Path) -> None:
    limits: Any = SimpleNamespace(hosts=SimpleNamespace(check=0.0), timeouts=SimpleNamespace(boot_s=0.0))
    assert (await burn_in.failure(limits, tmp_path, tmp_path)).endswith("(not over after 0 s)")
    assert "job.yaml" in await burn_in.failure(parse({}), tmp_path / "job.yaml", tmp_path)

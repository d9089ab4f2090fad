"""docs/ways.md is true: its files and functions exist, and no list gets longer."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/ways.md").read_text()
LISTS = dict(re.findall(r"^\(way-(\w+)\)=\n(.*?)(?=^\(way-|\Z)", PAGE, re.MULTILINE | re.DOTALL))
HELD = {"gradient": 27, "quorum": 14, "replica": 45}


@pytest.mark.parametrize("way", HELD)
def test_a_way_is_as_the_page_says(way: str) -> None:
    entries = re.findall(r"^(\d+)\. `([\w/]+\.py)` `(\w+)`: \S", LISTS[way], re.MULTILINE)
    assert [int(number) for number, _, _ in entries] == list(range(1, HELD[way] + 1))
    assert f"Today: {HELD[way]}." in LISTS[way]
    files = [file for _, file, _ in entries]
    assert len(files) == len(set(files)), "a file stands there twice"
    for _, file, name in entries:
        tree = ast.parse((ROOT / file).read_text())
        defined = {
            n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        }
        assert name in defined, f"{file} has no {name}"

"""What the protocol, security, papers and memory pages refer to is there."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ft_hsdp.fault_injection import PLACES

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/protocol.md").read_text()
NAMED = re.compile(r"`(?:(?:T|tests)/(?P<file>[\w/]+\.py))?(?:::)?(?P<name>test_\w+)?`")


def named(page: str) -> Iterator[tuple[str, str]]:
    """The tests of a page: (file, name or ""). A name without a file is of the file that was named last."""
    file = ""
    for found in NAMED.finditer(page):
        file = found["file"] or file
        if found["file"] or found["name"]:
            yield file, found["name"] or ""


PAGES = [PAGE, *((ROOT / "docs" / name).read_text() for name in ("security.md", "papers.md", "memory.md"))]
TESTS = sorted({test for page in PAGES for test in named(page)})


def test_tests_are_found_in_both_ways_of_naming_them() -> None:
    page = "`T/a.py::test_b`, `test_c` and `tests/d.py`, `::test_e`; `code`"
    assert [*named(page)] == [("a.py", "test_b"), ("a.py", "test_c"), ("d.py", ""), ("d.py", "test_e")]
    assert len(TESTS) > 150


@pytest.mark.parametrize(("file", "name"), TESTS, ids=[f"{f}-{n}" for f, n in TESTS])
def test_a_test_that_is_named_exists(file: str, name: str) -> None:
    source = (ROOT / "tests" / file).read_text()
    tests = {n.name for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert not name or name in tests


def test_every_window_has_its_row() -> None:
    rows = re.findall(r"^\| (W\d+) \|", PAGE, re.MULTILINE)
    assert rows[:50] == [f"W{n}" for n in range(1, 51)]
    memory = re.findall(r"^\| (M\d+) \|", (ROOT / "docs/memory.md").read_text(), re.MULTILINE)
    assert memory == [f"M{n}" for n in range(51, 65)]
    assert len(set(rows)) == len(rows), "a number stands there twice"


def test_the_places_and_transcripts_that_are_named_exist() -> None:
    for named in re.findall(r"\(place: ([^)]*)\)", PAGE):
        assert set(named.split(", ")) <= set(PLACES)
    for named in re.findall(r"test_transcript` \(([^)]*)\)", PAGE):
        for transcript in named.split(", "):
            assert (ROOT / f"tests/core/transcripts/{transcript}.txt").exists()

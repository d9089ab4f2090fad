"""A slice of what `make fuzz` does: the same inputs each time."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fuzz.fuzz_engine import Parser, fuzz
from tests.support.fuzz.fuzz_targets import targets, verdicts


@pytest.mark.parametrize("name", sorted(targets()))
def test_made_up_bytes_are_refused_as_they_should_be(name: str) -> None:
    assert fuzz(targets()[name](), 300, seed=7)["runs"] == 300


def test_the_fuzzer_finds_what_is_wrong() -> None:
    def parse(data: bytes) -> None:
        if b"[[" in data:
            raise IndexError(data)

    with pytest.raises(IndexError):
        fuzz(Parser(parse, [b"[]"], (ValueError,)), 20_000, seed=1)


# `python -O` drops assertions: none of them guards against what comes from outside, or does any work.


ROOT = Path(__file__).parents[2]
INPUTS = 50
PURE = {"isinstance", "len", "set"}


def test_parsers_of_outside_bytes_say_the_same() -> None:
    command = [sys.executable, "-O", "-m", "tests.support.fuzz.fuzz_targets", str(INPUTS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    optimised = json.loads(done.stdout)
    for name, said in verdicts(INPUTS).items():
        assert optimised[name] == said, name
        assert "AssertionError" not in said, f"{name} guards by an assertion"


@pytest.mark.parametrize("package", ["ft_hsdp", "lighthouse"])
def test_no_assertion_does_any_work(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Assert):
                calls = [each.func for each in ast.walk(node.test) if isinstance(each, ast.Call)]
                names = {getattr(func, "id", getattr(func, "attr", "?")) for func in calls}
                assert names <= PURE, f"{file}:{node.lineno}"

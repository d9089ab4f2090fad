"""The code keeps the shape that makes it easy to enter: see CONTRIBUTING.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.support import house


def test_the_limits_are_kept() -> None:
    assert [(what, value, allowed) for what, value, allowed, kept in house.shape().rows() if not kept] == []


def test_the_house_has_a_size() -> None:
    rows = house.size_rows(house.sizes(), house.SIZES)
    assert [(what, value, allowed) for what, value, allowed, kept in rows if not kept] == []


def test_a_house_that_grows_is_seen_and_one_that_shrinks_lowers_its_limit() -> None:
    allowed = {"statements": (100, 50), "event names": (100, 50), "test lines": (100, 50)}
    rows = house.size_rows({"statements": 101, "event names": 89, "test lines": 90}, allowed)
    assert [(what, limit, kept) for what, _, limit, kept in rows] == [
        ("statements", "<= 100, goal 50", False),
        ("event names", "<= 100, goal 50; lower the limit", False),
        ("test lines", "<= 100, goal 50", True),
    ]


def test_a_broken_limit_is_seen(tmp_path: Path) -> None:
    package = tmp_path / "ft_hsdp"
    package.mkdir()
    (package / "__init__.py").write_text('"""A package."""\n')
    late = "def late() -> None:\n    from ft_hsdp import two\n"
    for_types = "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from ft_hsdp import one\n"
    (package / "one.py").write_text(f"{late}\n\nclass Both:\n    pass\n" + "\n" * 700)
    (package / "two.py").write_text(f"{for_types}\n\nclass Both:\n    pass\n")
    found = house.shape(tmp_path)
    assert found.circles == [["ft_hsdp.one", "ft_hsdp.two"]]
    assert found.doubles == {"Both": ["ft_hsdp.one", "ft_hsdp.two"]}
    broken = [what for what, _, _, kept in found.rows() if not kept]
    assert broken == ["largest module (ft_hsdp.one)", "import circles", "class names defined twice"]


def test_no_call_is_hidden(tmp_path: Path) -> None:
    assert list(house.hidden_calls()) == []
    module = tmp_path / "ft_hsdp" / "one.py"
    module.parent.mkdir()
    module.write_text(
        "class Ring:\n    def __init__(self, peer):\n"
        "        self.then = lambda: None\n        peer.heard = self.heard\n"
        "        peer.later(lambda a, b: self.sum(a, b), lambda a: self.sum(a, 1))\n\n    def heard(self): ...\n"
    )
    assert list(house.hidden_calls(tmp_path)) == [
        "ft_hsdp/one.py:4: peer.heard",
        "ft_hsdp/one.py:5: lambda a, b: self.sum(a, b)",
    ]


def test_text_is_never_in_the_encoding_of_the_locale(tmp_path: Path) -> None:
    assert list(house.locale_encodings()) == []
    module = tmp_path / "ft_hsdp" / "one.py"
    module.parent.mkdir()
    said = "a.read_text(encoding='utf-8'); open(a, 'rb'); os.open(a, 0); ring.open(a); os.fdopen(a, mode='wb')"
    unsaid = "a.write_text(b); open(a); a.open('w'); os.fdopen(a); TemporaryFile('w+'); run(a, text=True)"
    module.write_text(f"{said}\n{unsaid}")
    found = [line.removeprefix("ft_hsdp/one.py:2: ") for line in house.locale_encodings(tmp_path)]
    assert found == ["a.write_text", "open", "a.open", "os.fdopen", "TemporaryFile", "run"]


def test_docstrings_say_something() -> None:
    assert list(house.unclear_docstrings()) == []


def test_each_package_opens_with_an_essay() -> None:
    lengths = {path: len((ast.get_docstring(tree) or "").splitlines()) for path, tree in house.packages()}
    assert len(lengths) > 30
    assert {path: lines for path, lines in lengths.items() if not 15 <= lines <= 40} == {}


def test_an_essay_names_each_module_of_its_package() -> None:
    missing = {
        f"{path}: {name}"
        for path, tree in house.packages()
        for name in house.modules_of(house.ROOT / path)
        if not re.search(rf"\b{name}\b", ast.get_docstring(tree) or "")
    }
    assert missing == set()


def test_reference_docstrings_name_parameters_and_results() -> None:
    modules = house.reference_modules()
    assert {"job.py", "communicator.py", "fetch.py", "writer.py", "replica.py", "transition.py"} <= {
        m.name for m in modules
    }
    assert list(house.undocumented(modules)) == []


def test_a_docstring_that_says_nothing_is_seen(tmp_path: Path) -> None:
    module = tmp_path / "ft_hsdp" / "one.py"
    module.parent.mkdir()
    module.write_text(
        '"""A module with docstrings."""\n\n\n'
        'class Ring:\n    """See `Communicator` for more about it."""\n\n'
        '    def __init__(self, size: int, depth: int) -> None:\n        """Make one of ``size``, filled."""\n\n'
        '    def sum(self, number: int) -> float:\n        """Sum it up."""\n\n'
        '    @property\n    def left(self) -> int:\n        """The neighbour on the left."""\n'
    )
    assert list(house.unclear_docstrings(tmp_path)) == [
        "ft_hsdp/one.py: Ring: See `Communicator` for more about it.",
        "ft_hsdp/one.py: sum: Sum it up.",
    ]
    assert list(house.undocumented([module])) == ["one.py: __init__: depth", "one.py: sum: number, the result"]

"""The size and shape of the code: statements, modules, folders, import circles, keys, events, tests, words.

Run it with ``python -m tests.support.house``.

It prints a table and exits with 1 if a limit is broken; `tests/test_house.py` checks these limits and docstrings.
"""

import ast
import json
import re
import statistics
import sys
import tomllib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = ("ft_hsdp", "lighthouse", "ftar_kernels")
SMALL = 60  # lines: a module below this needs a reason
MOST_SMALL, LARGEST, LEAST_MEDIAN, MOST_IN_A_FOLDER = 20, 600, 150, 17

# The size of the house: what is measured, its limit, and the goal. A limit only goes down: it lies at most `SLACK`
# above the figure, so a change that makes the house smaller lowers the limit, too.
SIZES: dict[str, tuple[int, int]] = {
    "statements": (42_490, 39_000),
    "lines with JavaScript": (78_123, 71_000),
    "benchmarks outside the package": (4_173, 4_173),  # statements: 4,000, `culprits`, `study_speed`
    "test lines": (72_753, 66_000),  # the model checker among them
    "modules with code": (308, 310),
    "configuration keys": (130, 124),  # 120; `interfaces`, `alerts`, two of `train`, `on_*`, `eval`, `check`
    "timeouts among them": (15, 14),
    "event names": (100, 100),
    "private reads in tests": (101, 120),
    "monkeypatch.setattr": (128, 150),
    "asserts on prose": (33, 100),
    "words of docs and ADRs": (59_999, 60_000),
}
SLACK = 0.1  # of the limit, or 2


@dataclass(frozen=True, slots=True)
class Shape:
    """What the table shows. ``circles`` are lists of modules, ``doubles`` names of classes with their modules."""

    lines: dict[str, int]  # by module
    folders: dict[str, int]
    circles: list[list[str]]
    doubles: dict[str, list[str]]

    def rows(self) -> Iterator[tuple[str, object, str, bool]]:
        """What is measured, what it is, what is allowed, and whether it is kept."""
        median = statistics.median(self.lines.values())
        small = sum(count < SMALL for count in self.lines.values())
        largest, longest = max((count, name) for name, count in self.lines.items())
        most, folder = max((count, name) for name, count in self.folders.items())
        yield "median lines of a module", median, f">= {LEAST_MEDIAN}", median >= LEAST_MEDIAN
        yield f"modules under {SMALL} lines", small, f"<= {MOST_SMALL}", small <= MOST_SMALL
        yield f"largest module ({longest})", largest, f"<= {LARGEST}", largest <= LARGEST
        yield f"modules in one folder ({folder})", most, f"<= {MOST_IN_A_FOLDER}", most <= MOST_IN_A_FOLDER
        yield "import circles", self.circles or 0, "0", not self.circles
        yield "class names defined twice", self.doubles or 0, "0", not self.doubles


def sizes(root: Path = ROOT) -> dict[str, int]:
    """Measure the figures of `SIZES` below ``root``.

    Statements are those of the syntax tree without docstrings. A private read is a use of ``_name`` of anything
    but ``self``, ``os`` and ``sys``; named tuples' own names do not count. An assert is on prose if it names a
    text of five words or more.
    """
    product, tests = list(_files(root)), sorted((root / "tests").rglob("*.py"))
    pages = list((root / "lighthouse" / "dashboard").glob("*.js"))
    keys = list(_leaves(json.loads((root / "configs" / "schema.json").read_text())))
    built = {root / "docs" / "_build", root / "docs" / "_generated"}
    docs = [path for path in (root / "docs").rglob("*.md") if built.isdisjoint(path.parents)]
    nodes = [node for path in tests for node in _nodes(path)]
    return {
        "statements": sum(map(statements, map(_nodes, product))),
        "lines with JavaScript": _count(product + pages),
        "benchmarks outside the package": sum(map(statements, map(_nodes, (root / "benchmarks").rglob("*.py")))),
        "test lines": _count(tests),
        "modules with code": sum(path.name != "__init__.py" for path in product),
        "configuration keys": len(keys),
        "timeouts among them": sum(key.startswith("timeouts.") for key in keys),
        "event names": len(json.loads((root / "tests" / "golden" / "events.json").read_text())),
        "private reads in tests": sum(map(_private, nodes)),
        "monkeypatch.setattr": sum(isinstance(n, ast.Attribute) and n.attr == "setattr" for n in nodes),
        "asserts on prose": sum(isinstance(n, ast.Assert) and _is_prose(n.test) for n in nodes),
        "words of docs and ADRs": sum(len(path.read_text().split()) for path in docs),
    }


def size_rows(
    sizes: dict[str, int], allowed: dict[str, tuple[int, int]]
) -> Iterator[tuple[str, object, str, bool]]:
    """As `Shape.rows`, for the sizes of a house."""
    for what, size in sizes.items():
        limit, goal = allowed[what]
        lower = size < limit - max(2, limit * SLACK)
        yield what, size, f"<= {limit}, goal {goal}{'; lower the limit' * lower}", size <= limit and not lower


def statements(nodes: Collection[ast.AST]) -> int:
    """The statements among the nodes of a module, without docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return sum(isinstance(node, ast.stmt) for node in nodes) - sum(
        ast.get_docstring(node) is not None for node in nodes if isinstance(node, documented)
    )


def _count(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def _leaves(schema: dict[str, Any]) -> Iterator[str]:
    """The dotted keys of a JSON schema; a list is one key."""
    todo: list[tuple[str, dict[str, Any]]] = [("", schema)]
    while todo:
        name, node = todo.pop()
        node = next((each for each in node.get("anyOf", ()) if "$ref" in each), node)
        node = schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
        if "properties" in node:
            todo += ((f"{name}.{key}".lstrip("."), child) for key, child in node["properties"].items())
        else:
            yield name


def _private(node: ast.AST) -> bool:
    if not isinstance(node, ast.Attribute) or not re.match(r"_(?!_|replace$|fields$|asdict$)", node.attr):
        return False
    return not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "os", "sys"))


def _is_prose(test: ast.expr) -> bool:
    texts = (n.value for n in ast.walk(test) if isinstance(n, ast.Constant) and isinstance(n.value, str))
    return any(len(re.findall(r"[A-Za-z]+", text)) >= 5 and text.count(" ") >= 4 for text in texts)


def shape(root: Path = ROOT) -> Shape:
    """The shape of the product below ``root``. ``__init__`` modules count as parts of import circles only."""
    lines: dict[str, int] = {}
    folders: dict[str, int] = defaultdict(int)
    classes: dict[str, list[str]] = defaultdict(list)
    for path in _files(root):
        name = _name(path, root)
        if path.name != "__init__.py":
            lines[name] = len(path.read_text().splitlines())
            folders[str(path.parent.relative_to(root))] += 1
        for node in _nodes(path):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(name)
    doubles = {name: where for name, where in classes.items() if len(where) > 1}
    return Shape(lines, dict(folders), circles(_graph(root)), doubles)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The groups of modules that import each other, directly or not (Tarjan's algorithm)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(one: str) -> None:
        number[one] = lowest[one] = len(number)
        stack.append(one)
        for other in graph[one]:
            if other not in number:
                visit(other)
                lowest[one] = min(lowest[one], lowest[other])
            elif other in stack:
                lowest[one] = min(lowest[one], number[other])
        if lowest[one] == number[one]:
            at = stack.index(one)
            group, stack[at:] = stack[at:], []
            if len(group) > 1:
                found.append(sorted(group))

    for name in graph:
        if name not in number:
            visit(name)
    return found


def packages(root: Path = ROOT) -> Iterator[tuple[str, ast.Module]]:
    """The packages below ``root`` by path, each with its parsed ``__init__``."""
    for path in _files(root):
        if path.name == "__init__.py":
            yield str(path.parent.relative_to(root)), _parsed(path)


def modules_of(package: Path) -> list[str]:
    inside = (*package.glob("*.py"), *(path.parent for path in package.glob("*/__init__.py")))
    return sorted(path.stem for path in inside if not path.stem.startswith("__"))


def unclear_docstrings(root: Path = ROOT) -> Iterator[str]:
    """Yield what has a docstring of fewer than four words, or one that only refers to another."""
    for path in _files(root):
        for node in _nodes(path):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text is not None and (len(text.split()) < 4 or re.match(r"See\b", text)):
                    yield f"{path.relative_to(root)}: {getattr(node, 'name', '')}: {text}"


def hidden_calls(root: Path = ROOT) -> Iterator[str]:
    """Lambdas that only forward, and methods or lambdas that are put into an attribute of another object."""
    for path in _files(root):
        nodes = [n for n in _nodes(path) if isinstance(n, ast.Lambda | ast.Assign | ast.FunctionDef)]
        methods = {f"self.{n.name}" for n in nodes if isinstance(n, ast.FunctionDef) and not n.decorator_list}
        for node in nodes:
            found: ast.expr | None = None
            if isinstance(node, ast.Lambda) and _forwards(node):
                found = node
            elif isinstance(node, ast.Assign) and isinstance(into := node.targets[0], ast.Attribute):
                foreign = ast.unparse(into.value) != "self"
                if foreign and (isinstance(node.value, ast.Lambda) or ast.unparse(node.value) in methods):
                    found = into
            if found is not None:
                yield f"{path.relative_to(root)}:{found.lineno}: {ast.unparse(found)}"


def _forwards(node: ast.Lambda) -> bool:
    names = [argument.arg for argument in node.args.args]
    if not names or not isinstance(node.body, ast.Call) or node.args.defaults or node.args.vararg:
        return False
    passed = [ast.unparse(argument) for argument in node.body.args]
    own = {each.id for each in ast.walk(node.body.func) if isinstance(each, ast.Name)}
    return passed == names and not node.body.keywords and not own.intersection(names)


def locale_encodings(root: Path = ROOT) -> Iterator[str]:
    """Yield the calls that read or write text, of a file or another program, in the encoding of the locale."""
    for path in _files(root):
        for node in _nodes(path):
            if isinstance(node, ast.Call) and _is_of_the_locale(node):
                yield f"{path.relative_to(root)}:{node.lineno}: {ast.unparse(node.func)}"


def _is_of_the_locale(call: ast.Call) -> bool:
    name, more = ast.unparse(call.func), {keyword.arg: keyword.value for keyword in call.keywords}
    if "encoding" in more:
        return False
    texts = [str(n.value) for n in (*call.args, more.get("mode")) if isinstance(n, ast.Constant)]
    modes = [text for text in texts if re.fullmatch("[rwxabt+]+", text)]
    if re.search(r"(^|\.)(open|fdopen|(Named)?TemporaryFile)$", name):
        return any("b" not in mode for mode in modes) if modes else name in ("open", "os.fdopen")
    return name.endswith((".read_text", ".write_text")) or bool({"text", "universal_newlines"} & more.keys())


def reference_modules(root: Path = ROOT) -> list[Path]:
    """The modules whose docstrings are linted in full: those that pyproject.toml exempts from per-file-ignores."""
    ignores = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]["per-file-ignores"]
    (pattern,) = (re.fullmatch(r"!\{(.*)\}\.py", name) for name in ignores if name.startswith("!"))
    assert pattern is not None
    return sorted(path for part in pattern[1].split(",") for path in root.glob(f"{part}.py"))


def undocumented(paths: Iterable[Path]) -> Iterator[str]:
    """Yield the parameters and results of public functions in ``paths`` that the docstring does not name.

    A class's docstring counts for its ``__init__``. The parameter ``s``, a state, needs no name.
    """
    for path in paths:
        for owner, function in _public_functions(_parsed(path)):
            text = ast.get_docstring(function) or ""
            if function.name == "__init__" and owner is not None:
                text += ast.get_docstring(owner) or ""
            args = function.args
            names = [arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
            missing = [n for n in names if n not in ("self", "cls", "s") and not re.search(rf"\b{n}\b", text)]
            result = "None" if function.returns is None else ast.unparse(function.returns)
            if result not in ("None", "NoReturn") and not re.search(r"\b(return|yield)s?\b", text, re.IGNORECASE):
                missing.append("the result")
            if missing:
                yield f"{path.name}: {function.name}: {', '.join(missing)}"


def _public_functions(
    tree: ast.Module | ast.ClassDef,
) -> Iterator[tuple[ast.ClassDef | None, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Functions and methods with their classes. Properties, whose docstrings say what they are, are left out."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _public_functions(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            plain = not any(isinstance(each, ast.Name) and each.id == "property" for each in node.decorator_list)
            if plain and (node.name == "__init__" or not node.name.startswith("_")):
                yield tree if isinstance(tree, ast.ClassDef) else None, node


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def _nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(_parsed(path)))


def _files(root: Path) -> Iterator[Path]:
    for package in PACKAGES:
        yield from sorted((root / package).rglob("*.py"))


def _name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _graph(root: Path) -> dict[str, set[str]]:
    """Which module imports which, within functions and for types alone, too."""
    paths = {_name(path, root): path for path in _files(root)}
    return {name: set(_imported(_nodes(path), paths.keys())) - {name} for name, path in paths.items()}


def _imported(nodes: Iterable[ast.AST], known: Collection[str]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if full in known:
                    yield full
                elif node.module in known:
                    yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)


def main() -> int:
    """Print the table; 1 if a limit is broken."""
    kept = True
    for what, value, allowed, fine in (*size_rows(sizes(), SIZES), *shape().rows()):
        print(f"{'' if fine else '! '}{what}: {value}{f' ({allowed})' if allowed else ''}")
        kept = kept and fine
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())

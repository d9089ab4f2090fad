"""The check of the user's script or function: it is compiled, and what it imports is looked for. It is not run."""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder

from ft_hsdp.config.entry import digest, is_function, locate, stamped, title
from ft_hsdp.launch.doctor.result import Bad, Subject


def entry(subject: Subject) -> str:
    """Check that `entry` can be found and compiled, and that the modules that it imports first are here."""
    name = subject.config.entry
    assert name is not None
    stamped(subject.config)  # found, readable, and Python
    path = locate(name)
    content = path.read_bytes()
    shown = f"{title(name)} compiles (digest {digest(content)[:8]})"
    if path.suffix != ".py":
        return f"{title(name)} is in {path}, which is not Python source"
    tree = ast.parse(content)
    folder = os.getcwd() if is_function(name) else str(path.resolve().parent)
    missing = [each for each in dict.fromkeys(_imported(tree)) if not _is_here(each, folder)]
    if missing:
        wanted = ", ".join(missing)
        raise Bad(f"{title(name)} imports {wanted}: not installed here; pip install it, or set PYTHONPATH")
    function = name.partition(":")[2]
    if function and not _binds(tree, function):
        raise Bad(f"{path} has no {function} at its top level; write the name of a function after the colon")
    return f"{shown}; what it imports is here"


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yield the first parts of the modules that are imported unconditionally at the top level."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (each.name.partition(".")[0] for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            yield node.module.partition(".")[0]


def _is_here(module: str, folder: str) -> bool:
    """Return whether a module at the top can be imported by a script in ``folder``."""
    if module in sys.builtin_module_names or PathFinder.find_spec(module, [folder, *sys.path]) is not None:
        return True
    try:
        return importlib.util.find_spec(module) is not None  # an installation may have a finder of its own
    except (ImportError, ValueError):
        return False


def _binds(tree: ast.Module, name: str) -> bool:
    """Return whether a name may be bound by a statement at the top level."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
            return True
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name:
            return True
        if isinstance(node, ast.alias) and (node.asname or node.name) in (name, "*"):
            return True
    return False

"""What must not be in the code: nothing is unpickled, nothing runs what a peer sent."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(p for top in ("ft_hsdp", "lighthouse", "ftar_kernels") for p in (ROOT / top).rglob("*.py"))
MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle"}
CALLS = {"eval", "exec"}
ATTRIBUTES = {
    ("torch", "load"),
    ("yaml", "unsafe_load"),
    *(("dist", f"{name}_object") for name in ("gather", "all_gather", "scatter")),
    *(("dist", f"{name}_object_list") for name in ("broadcast", "send", "recv", "scatter")),
}


def offences(source: str) -> list[str]:
    """What in a source could run what a peer sent."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names):
                found += [a.name for a in names if a.name.split(".")[0] in MODULES]
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in MODULES:
                found.append(module)
            case ast.ImportFrom(module=str(module), names=names):
                found += [f"{module}.{a.name}" for a in names if (module, a.name) in ATTRIBUTES]
            case ast.Call(func=ast.Name(name)) if name in CALLS:
                found.append(name)
            case ast.Attribute(value=ast.Name(owner), attr=attribute) if (owner, attribute) in ATTRIBUTES:
                found.append(f"{owner}.{attribute}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_is_unpickled(path: Path) -> None:
    assert not offences(path.read_text())


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "torch.load(f)",
        "from torch import load",
        "dist.broadcast_object_list(x)",
        "eval(x)",
    ],
)
def test_the_check_can_fail(source: str) -> None:
    assert offences(source)

"""The pages of the documentation site that docs/generate.py makes from the code."""

import ast
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from ft_hsdp import event_table, protocol
from ft_hsdp.core.replica_state import Phase
from ft_hsdp.launch import cli

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_of_the_index_exists_or_is_generated(generate: ModuleType) -> None:
    blocks = re.findall(r"```\{toctree\}\n(.*?)```", (DOCS / "index.md").read_text(), re.DOTALL)
    entries = [line for block in blocks for line in block.splitlines() if line and not line.startswith(":")]
    assert len(entries) > 30
    made = {f"_generated/{name}" for name in generate.PAGES}
    for entry in entries:
        assert entry in made or sorted(DOCS.glob(f"{entry}.md")), entry
    pages = {str(f.relative_to(DOCS).with_suffix("")) for f in DOCS.glob("*.md")} - {"index"}
    assert pages | made <= set(entries), "a page is in no table of contents"


def test_references_name_everything_that_the_code_has(generate: ModuleType) -> None:
    commands = generate.commands()
    assert [name for name in cli.COMMANDS if f"\n## {name}\n" not in commands] == []
    events = generate.events()
    assert [name for name in event_table.EVENTS if f"| `{name}` |" not in events] == []
    wire = generate.wire()
    assert [tag for tag in protocol.MESSAGES if f"| `{tag}` |" not in wire] == []
    keys = generate.configuration()
    for key in ("replicas", "train.poison", "chaos[].at_step", "timeouts.silence_s"):
        assert f"| `{key}` |" in keys


def test_the_state_machines_follow_from_the_code(generate: ModuleType) -> None:
    page = generate.states()
    assert [p for p in Phase if f"| `{p.name}` |" not in page] == []
    assert re.search(r"\| `ASKING` \| `REDUCING` \| [^|]*Answered", page)
    assert re.search(r"\| `VOTED` \| `LEAVING` \| [^|]*TokenArrived", page)
    assert not re.search(r"\| `DONE` \| `", page), "a replica that is done stays done"
    assert re.search(r"\| `FATAL` \| [^|]+ \| CLOSED \|", page)
    assert re.search(r"\| `stage` \| WRITING \|", page)


def test_packages_and_the_python_api_are_listed(generate: ModuleType) -> None:
    packages = generate.packages()
    for name in ("ft_hsdp.core", "lighthouse.quorum", "ftar_kernels"):
        assert f"\n## {name}\n" in packages
    assert "| `transition` |" in packages
    assert "autofunction:: ft_hsdp.train.join.join" in generate.api()


def test_a_docstring_becomes_markdown(generate: ModuleType) -> None:
    text = "First <line>, `a<b>`.\n\n- `x`: one\n    more\n\nExample:\n    call(1)\n\n    call(2)\nAfter."
    code = ["```text", "call(1)", "", "call(2)", "```"]
    prose = ["First \\<line>, `a<b>`.", "", "- `x`: one", "    more", "", "Example:", ""]
    assert generate.markdown(text).splitlines() == [*prose, *code, "", "After."]


def test_the_readme_is_one_page_and_its_links_and_folders_exist() -> None:
    readme = (DOCS.parent / "README.md").read_text()
    assert len(readme.split()) <= 1400
    assert len(readme.splitlines()) <= 250
    links = re.findall(r"\]\((?!http)([^)#]+)\)", readme)
    assert len(links) > 20
    assert [link for link in links if not (DOCS.parent / link).exists()] == []
    folders = re.findall(r"^([\w/]+)/ ", readme, re.MULTILINE)
    assert [folder for folder in folders if not (DOCS.parent / folder).is_dir()] == []
    packages = {f.parent.name for f in (DOCS.parent / "ft_hsdp").glob("*/__init__.py")}
    assert packages <= {folder.removeprefix("ft_hsdp/") for folder in folders}, "a package is not listed"


def test_the_glossary_is_sorted_and_explains_each_word_once() -> None:
    terms = re.findall(r"^(.+)\n: ", (DOCS / "glossary.md").read_text(), re.MULTILINE)
    assert len(terms) > 60
    assert terms == sorted(terms, key=str.lower)
    assert len(terms) == len(set(terms))


# docs/ways.md is true: its files and functions exist, and no list gets longer.


ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/ways.md").read_text()
LISTS = dict(re.findall(r"^\(way-(\w+)\)=\n(.*?)(?=^\(way-|\Z)", PAGE, re.MULTILINE | re.DOTALL))
HELD = {"gradient": 28, "quorum": 15, "replica": 46}


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

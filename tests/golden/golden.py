"""What other programs read of ours, as files beside this one.

These are encoded messages, names of events, keys of run files, ``--help`` and the digest of a quickstart.
``python tests/golden/golden.py record`` writes all that tests check; with ``--run`` it also trains the quickstart
for its files and its digest, in two minutes. ``check`` makes them again and names what differs. No test checks
what is trained: another processor may round it differently.
"""

import argparse
import dataclasses
import enum
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints
from unittest import mock

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DIGEST = ["step", "lineage", "digest"]


def example(hint: Any, numbers: Iterator[int], name: str = "") -> Any:
    """A value of a type: each number once, each text the name of its field, two items in each collection."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return example(arguments[0], numbers, name)
    if origin is Literal:
        return arguments[-1]
    if origin in (Union, types.UnionType):
        return example(next(a for a in arguments if a is not type(None)), numbers, name)
    if origin is tuple:
        items = arguments[:1] * 2 if arguments[-1] is Ellipsis else arguments
        return tuple(example(item, numbers, name) for item in items)
    if origin in (list, frozenset, set):
        return origin(example(arguments[0], numbers, name) for _ in range(2))
    if origin is dict or getattr(origin, "__name__", "") == "Mapping":
        return {
            example(arguments[0], numbers, f"{name}{i}"): example(arguments[1], numbers, name) for i in range(2)
        }
    if dataclasses.is_dataclass(hint) or hasattr(hint, "_fields"):
        hints = get_type_hints(hint, include_extras=True)
        names = getattr(hint, "_fields", ()) or [f.name for f in dataclasses.fields(hint)]
        values = {name: example(hints[name], numbers, name) for name in names}
        return hint(**values)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return list(hint)[-1]
    if hint is bool:
        return True
    if hint is str:
        return name
    if hint in (int, float):
        return hint(next(numbers))
    if hint in (Any, object):
        return name
    raise TypeError(f"no example of {hint!r} for {name!r}")


def messages(module: str, table: str, encode: str) -> dict[str, Any]:
    there = importlib.import_module(module)
    found = {}
    for tag, cls in getattr(there, table).items():
        message = example(cls, count(1))
        data = getattr(there, encode)(message)
        found[tag] = json.loads(data[data.index(b'{"') :])
    return found


def helps(parser: argparse.ArgumentParser) -> dict[str, str]:
    """What ``--help`` says, by command, 100 columns wide."""
    with mock.patch.dict(os.environ, COLUMNS="100"):
        found = {parser.prog: parser.format_help()}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                found |= helps(each)
    return found


def shape(value: Any) -> Any:
    """The keys of a document, nested; of a list, those of all its items; numbers as keys are one key."""
    if isinstance(value, dict):
        numbered = all(key.lstrip("-").isdigit() for key in value) and value
        if numbered:
            return {"0": merged([shape(each) for each in value.values()])}
        return {key: shape(each) for key, each in sorted(value.items())}
    if isinstance(value, list):
        return merged([shape(each) for each in value])
    return None


def merged(shapes: list[Any]) -> Any:
    found: dict[str, Any] = {}
    for each in shapes:
        if isinstance(each, dict):
            for key, inner in each.items():
                found[key] = merged([found.get(key), inner])
    return dict(sorted(found.items())) or None


def run_files(run: Path) -> dict[str, Any]:
    """The keys of each JSON file of a run, by the file's name without numbers and names of incarnations."""
    found: dict[str, list[Any]] = {}
    for path in sorted(run.rglob("*.json*")):
        name = re.sub(r"\d+", "N", re.sub(r"-[0-9a-f]{6,}-", "-RUN-", str(path.relative_to(run))))
        text = path.read_text()
        rows = [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else [json.loads(text)]
        kinds = {row.get("event", ""): [] for row in rows if isinstance(row, dict)}
        for row in rows:
            if isinstance(row, dict):
                kinds[row.get("event", "")].append(shape(row))
        for kind, shapes in kinds.items():
            found.setdefault(f"{name} {kind}".strip(), []).extend(shapes)
    return {key: merged(shapes) for key, shapes in sorted(found.items())}


def trained(folder: Path, *overrides: str) -> Path:
    """The runs' folder after a quickstart without chaos, with checkpoints."""
    up = [sys.executable, str(ROOT / "launcher.py"), "up", str(ROOT / "configs/quickstart.yaml"), "--chaos=[]"]
    saved = "--checkpoint={every: 50, dir: runs/checkpoints}"
    subprocess.run([*up, saved, *overrides], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return folder / "runs"


def answers() -> dict[str, Any]:
    """The keys of what the lighthouse answers to readers, for a job of some hours."""
    from lighthouse.journal.database import MemoryDatabase
    from lighthouse.journal.journal import JobJournal
    from lighthouse.overview.overview import JobInfo
    from tests.support.lighthouse.day import day
    from tests.support.lighthouse.lighthouse_helpers import make_service

    database = MemoryDatabase()
    database.append(list(day(3, hours=3.0)))
    journal = JobJournal(database, JobInfo("job", 3, 2, 100_000))
    told = {"overview": journal.overview(), "events": journal.events(), "status": make_service(3)[0].status()}
    return {name: shape(json.loads(json.dumps(each))) for name, each in told.items()}


def everything(*, train: bool) -> dict[str, Any]:
    """All golden documents by the names of their files."""
    from ft_hsdp.event_table import EVENTS
    from ft_hsdp.launch.arguments import build_parser

    found = {
        "messages.json": messages("ft_hsdp.protocol", "MESSAGES", "encode"),
        "agent_messages.json": messages("ft_hsdp.state.agent.messages", "MESSAGES", "frame"),
        "answers.json": answers(),
        "events.json": sorted(EVENTS),
        "help.json": {name: text.splitlines() for name, text in helps(build_parser()).items()},
        "schema.json": json.loads((ROOT / "configs/schema.json").read_text()),
    }
    if train:
        with tempfile.TemporaryDirectory() as folder:
            runs = trained(Path(folder))
            found["run_files.json"] = run_files(runs)
            final = json.loads((runs / "quickstart/replicas/0/final.json").read_text())
            found["digest.json"] = {key: final[key] for key in DIGEST}
    return found


def differing(one: Any, two: Any, path: str = "") -> list[str]:
    if isinstance(one, dict) and isinstance(two, dict):
        return [d for key in sorted({*one, *two}) for d in differing(one.get(key), two.get(key), f"{path}/{key}")]
    return [] if one == two else [f"{path}: {json.dumps(one)[:200]} is now {json.dumps(two)[:200]}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["record", "check"])
    parser.add_argument("--run", action="store_true", help="train the quickstart for its files and digest, too")
    options = parser.parse_args()
    found = everything(train=options.run)
    if options.what == "record":
        for name, document in found.items():
            (HERE / name).write_text(json.dumps(document, indent=1) + "\n")
        return
    wrong = [
        d for n, document in found.items() for d in differing(json.loads((HERE / n).read_text()), document, n)
    ]
    print(*wrong, sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()

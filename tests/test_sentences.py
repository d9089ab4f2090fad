"""Every event that our processes write, and every kind of failure, has a sentence."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from ft_hsdp.config import ChaosConfig
from ft_hsdp.event_table import EVENTS, fault, grave, tell
from lighthouse.quorum.events import Action

ROOT = Path(__file__).parents[1]
NAME = re.compile(r"[A-Z][a-z]+([A-Z][a-z]+)*")
WRITE = {"note_event", "event", "note", "_event", "_note", "Note", "Verdict", "_tell", "supervised"}
FACTS: dict[str, Any] = {
    "t": 1.0,
    "source": "replica",
    "replica": 1,
    "rank": 0,
    "incarnation": "1-a-0",
    "pid": 7,
    "reason": "because",
    "kind": "SIGKILL",
    "step": 3,
    "epoch": 2,
    "members": [0, 1],
    "replicas": [0, 1],
    "before": 2,
    "spare": 1,
    "seconds": 1.5,
    "file": "fed.jsonl",
    "lines": 3,
    "bytes": 10,
    "donor": 2,
    "suspect": 0,
    "index": 1,
    "shard": 0,
    "checkpoint": "step-3-epoch-2-1-a-0",
    "rows": 3,
    "url": "http://127.0.0.1:1",
    "host": "s0",
    "from": 4,
    "to": 2,
    "ranks": 3,
    "setting": "lr of AdamW",
    "order": "drain",
    "old": 0.1,
    "new": 0.2,
}


def texts(node: ast.AST) -> set[str]:
    """The names of events among the texts in a piece of code."""
    found = {
        each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)
    }
    return set(filter(NAME.fullmatch, found))


def written(tree: ast.Module) -> Iterator[set[str]]:
    """The names of events that a module writes, also those that it has put into a variable before."""
    nodes = list(ast.walk(tree))
    given = [
        (t.id, n.value) for n in nodes if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)
    ]
    for node in nodes:
        if isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            yield from (texts(v) for k, v in pairs if isinstance(k, ast.Constant) and k.value == "event")
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "event":
            yield texts(node.annotation)
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            names = node.args[:2] if called in WRITE else []
            for argument in [*names, *(k.value for k in node.keywords if k.arg == "event")]:
                if isinstance(argument, ast.Constant):
                    yield texts(argument)
                variables = {each.id for each in ast.walk(argument) if isinstance(each, ast.Name)}
                yield from (texts(value) for name, value in given if name in variables)


def test_every_event_that_is_written_has_a_sentence_and_no_other() -> None:
    files = [*ROOT.glob("ft_hsdp/**/*.py"), *ROOT.glob("lighthouse/**/*.py")]
    other = {"render", "event_table.py"}
    sources = {f: f.read_text() for f in files if not other & {*f.relative_to(ROOT).parts}}
    found: set[str] = set().union(*(names for text in sources.values() for names in written(ast.parse(text))))
    assert len(found) > 70
    assert sorted(found - EVENTS.keys()) == []
    assert sorted(EVENTS.keys() - found) == []


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"event": "ProcessExited", "kind": "exit 0"}, False),
        ({"event": "ProcessExited", "kind": "SIGKILL"}, True),
        ({"event": "ReplicaExited", "kind": "done"}, False),
        ({"event": "RingBroken"}, True),
        ({"event": "CheckedIn"}, False),
        ({"event": "NewInALaterVersion"}, False),
    ],
)
def test_the_orderly_end_of_a_process_is_no_failure(row: dict[str, Any], expected: bool) -> None:
    assert grave(row) is expected


@pytest.mark.parametrize("name", EVENTS)
def test_a_sentence_is_plain_and_needs_no_more_than_the_facts_of_its_event(name: str) -> None:
    said = tell({"event": name, **FACTS}, reason=False)
    assert name not in said
    assert len(said.split()) > 2
    assert tell({"event": name, **FACTS}).endswith(" - because")


@pytest.mark.parametrize("name", [name for name, kind in EVENTS.items() if kind.over])
def test_what_is_over_has_a_sentence_of_its_own_and_is_no_failure(name: str) -> None:
    begun, over = {"event": name, **FACTS, "over": False}, {"event": name, **FACTS, "over": True}
    assert tell(begun) != tell(over)
    assert name not in tell(over, reason=False)
    assert not grave(over)


@pytest.mark.parametrize("facts", [{"order": order} for order in get_args(Action)])
def test_each_order_of_an_operator_has_a_sentence(facts: dict[str, str]) -> None:
    assert tell({"event": "OperatorOrdered", **FACTS, **facts}).startswith("an operator ")


@pytest.mark.parametrize(
    "row", [{"event": "NewInALaterVersion", "replica": 1}, {"event": "SpareWarmed", "replica": 1}]
)
def test_an_event_that_is_not_known_or_lacks_its_facts_is_named(row: dict[str, Any]) -> None:
    assert tell(row) == f"{row['event']} replica 1"


@pytest.mark.parametrize("wrong", [None, "x", [1], {"a": 1}, 10**400, float("nan")])
def test_whatever_a_row_holds_there_is_a_sentence(wrong: object) -> None:
    for name in EVENTS:
        row: dict[str, Any] = dict.fromkeys(FACTS, wrong)
        assert tell({**row, "event": name, "reason": "because"})


def test_every_kind_of_failure_has_words() -> None:
    kinds = {*get_args(ChaosConfig.model_fields["kind"].annotation)} - {"signal"}
    ends = {"exit 0 of some ranks only", "exit 0 before the end", "left", "evicted", "not started"}
    ends |= {"ring broken", "silent"}
    for kind in kinds | ends | {"SIGSTOP", "SIGTERM", "exit 64", "exit 69", "exit 75", "exit 76"}:
        assert not fault(kind).startswith(("failed:", "ended with an error")), kind
        assert "_" not in fault(kind)
    assert fault("SIGKILL") == "was killed by SIGKILL"
    assert fault("signal 40") == "was killed by signal 40"
    assert fault("exit 1") == "ended with an error (exit 1)"
    assert fault("something else") == "failed: something else"

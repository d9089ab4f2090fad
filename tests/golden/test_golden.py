"""What other programs read of ours is what it was. A change to it changes a file here, in a commit of its own."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.golden import golden

KEPT = golden.everything(train=False)


@pytest.mark.parametrize("name", KEPT)
def test_it_is_as_recorded(name: str) -> None:
    recorded = json.loads((Path(golden.__file__).parent / name).read_text())
    assert golden.differing(recorded, json.loads(json.dumps(KEPT[name])), name) == []


def test_a_difference_is_named() -> None:
    one: dict[str, Any] = {"a": {"b": 1, "c": [1]}}
    assert golden.differing(one, {"a": {"b": 1, "c": [2]}}) == ["/a/c: [1] is now [2]"]
    assert golden.differing(one, {"a": {"c": [1]}}) == ["/a/b: 1 is now null"]

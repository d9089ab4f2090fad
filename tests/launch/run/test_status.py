"""The lines of `status` say whether a lost host takes a shard of the state with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ft_hsdp.launch.run.directory import RunDir
from ft_hsdp.launch.run.status import lines


@pytest.mark.parametrize(
    ("word", "first", "more"),
    [
        ("protected", "job: step 3, epoch 2, protected, lighthouse None (pid None)", []),
        (
            "unprotected",
            "job: step 3, epoch 2, unprotected, lighthouse None (pid None)",
            ["  unprotected: one host alone"],
        ),
        ("", "job: step 3, epoch 2, lighthouse None (pid None)", []),
    ],
)
def test_the_job_is_protected_or_not_and_why(tmp_path: Path, word: str, first: str, more: list[str]) -> None:
    said = {"word": word, "why": "one host alone", "copies": None, "apart": "host"}
    document: dict[str, Any] = {"job": "job", "step": 3, "epoch": 2, "lighthouse": {"pid": None, "url": None}}
    assert lines(RunDir(tmp_path), {**document, "protection": said, "replicas": []}) == [first, *more]
    assert lines(RunDir(tmp_path), {**document, "replicas": []}) == [
        first.replace(f"{word}, ", "") if word else first
    ]

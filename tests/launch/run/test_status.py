from pathlib import Path
from typing import Any

import pytest

from ft_hsdp.launch.run.directory import RunDir
from ft_hsdp.launch.run.status import lines


@pytest.mark.parametrize(("word", "why"), [("protected", False), ("unprotected", True), ("", False)])
def test_the_job_is_protected_or_not_and_why(tmp_path: Path, word: str, why: bool) -> None:
    said = {"word": word, "why": "one host alone", "copies": None, "apart": "host"}
    document: dict[str, Any] = {"job": "job", "step": 3, "epoch": 2, "lighthouse": {"pid": None, "url": None}}
    first, *more = lines(RunDir(tmp_path), {**document, "protection": said, "replicas": []})
    assert ("protected" in first, [line.split()[0] for line in more]) == (bool(word), ["unprotected:"] * why)
    assert "protected" not in "".join(lines(RunDir(tmp_path), {**document, "replicas": []}))

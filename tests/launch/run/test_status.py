import json
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ft_hsdp.config import parse
from ft_hsdp.errors import LighthouseUnreachable
from ft_hsdp.http_proof import HEADER, keys_of
from ft_hsdp.jsonl import replace_json
from ft_hsdp.launch.run.directory import RunDir, find_running, write_job_files
from ft_hsdp.launch.run.status import lines, status
from ft_hsdp.lifetime import identity
from tests.support.answering import Answering, serving

TOKEN = "a" * 64


class Elsewhere(Answering):
    """A lighthouse of another machine."""

    def do_GET(self) -> None:
        body, asked = json.dumps({"step": 7, "epoch": 2}).encode(), self.headers["Authorization"].split()[-1]
        proof = keys_of(TOKEN).answer(asked.encode(), b"challenge", 200, body).decode()
        self.answer(200, body, {HEADER: f"challenge {proof}"})


@pytest.mark.parametrize("who", [{"host": "node7", "boot": "another"}, {"boot": "an earlier one"}, {"pid": 0}])
def test_a_lighthouse_that_cannot_be_looked_up_here_is_asked(tmp_path: Path, who: dict[str, Any]) -> None:
    run = RunDir(tmp_path / "job")
    write_job_files(run, parse({"job": {"name": "job", "runs_dir": str(tmp_path)}}), TOKEN)
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere)) as url:
        replace_json(run.lighthouse, {**identity(), **who, "url": url})
        assert [status(find_running(tmp_path, name))["step"] for name in (None, "job")] == [7, 7]
    with pytest.raises(LighthouseUnreachable, match=url):
        status(find_running(tmp_path, "job"))


@pytest.mark.parametrize(("word", "why"), [("protected", False), ("unprotected", True), ("", False)])
def test_the_job_is_protected_or_not_and_why(tmp_path: Path, word: str, why: bool) -> None:
    said = {"word": word, "why": "one host alone", "copies": None, "apart": "host"}
    document: dict[str, Any] = {"job": "job", "step": 3, "epoch": 2, "lighthouse": {"pid": None, "url": None}}
    first, *more = lines(RunDir(tmp_path), {**document, "protection": said, "replicas": []})
    assert ("protected" in first, [line.split()[0] for line in more]) == (bool(word), ["unprotected:"] * why)
    assert "protected" not in "".join(lines(RunDir(tmp_path), {**document, "replicas": []}))

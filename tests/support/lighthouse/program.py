"""`python -m lighthouse` in a process of its own, as its run directory says, and what a replica asks of it."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import httpx

from ft_hsdp import protocol
from ft_hsdp.config import config_hash, dump, load, parse
from ft_hsdp.core.grant import Continue, Grant
from ft_hsdp.secret import TOKEN_VARIABLE
from tests.support.lighthouse.lighthouse_helpers import TOKEN, ask
from tests.support.lighthouse.signed import BlockingProof
from tests.support.waiting import until

ROOT = Path(__file__).parents[3]


def furnish(run: Path, **keys: Any) -> Path:
    """Make a run directory of two replicas."""
    run.mkdir()
    (run / "config.yaml").write_text(dump(parse({"replicas": 2, "train": {"steps": 10}, **keys})))
    (run / "token").write_text(TOKEN)
    return run


class Program:
    """A context that kills it. What it says is in ``log``, which others of the run continue."""

    def __init__(self, run: Path, *arguments: str, seat: int | None = None, **environment: str) -> None:
        self.run, self.log = run, run / "log"
        self._file = run / "lighthouse.json" if seat is None else run / "lighthouse" / f"seat-{seat}.json"
        words = [*arguments, *([] if seat is None else ["--seat", str(seat)])]
        env = {k: v for k, v in os.environ.items() if k != TOKEN_VARIABLE} | environment
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", "lighthouse", "--run", str(run), *words]
            self.process = subprocess.Popen(command, cwd=ROOT, env=env, stderr=log)
        self.http = httpx.Client(auth=BlockingProof(TOKEN), timeout=10.0, trust_env=False)
        self._agreed = config_hash(load(run / "config.yaml"))

    def __enter__(self) -> Self:
        assert self.url
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.http.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    @cached_property
    def said(self) -> dict[str, Any]:
        """What its file says, once it listens."""

        def own() -> bool:
            assert self.process.poll() is None, self.tail()
            return self._file.is_file() and json.loads(self._file.read_text())["pid"] == self.process.pid

        until(own, "it listens")
        found: dict[str, Any] = json.loads(self._file.read_text())
        return found

    @property
    def url(self) -> str:
        return str(self.said["url"])

    def tail(self) -> str:
        return self.log.read_text()[-3000:]

    def end(self) -> tuple[int, list[str]]:
        """Its exit code, and its lines."""
        return self.process.wait(30), self.log.read_text().splitlines()

    def get(self, path: str) -> Any:
        return self.http.get(f"{self.url}{path}").json()

    def message(self, *arguments: Any, **fields: Any) -> protocol.QuorumRequest:
        """An ask of a replica of this job."""
        return replace(ask(*arguments, **fields), config_hash=self._agreed)

    def post(self, *arguments: Any, **fields: Any) -> httpx.Response:
        content = protocol.encode(self.message(*arguments, **fields))
        return self.http.post(f"{self.url}/v1/quorum", content=content)

    def answer(self, *arguments: Any, **fields: Any) -> Any:
        response = self.post(*arguments, **fields)
        assert response.status_code == 200, response.text
        return protocol.decode(response.content, Grant, Continue, protocol.Wait)

    def first_epoch(self) -> Grant:
        """Both replicas ask at once."""
        with ThreadPoolExecutor(2) as pool:
            one, other = pool.map(self.answer, (0, 1))
        assert one == other
        assert isinstance(one, Grant)
        return one

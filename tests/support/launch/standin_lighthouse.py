import argparse
import json
import os
import socket
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

from ft_hsdp.http_proof import HEADER
from ft_hsdp.jsonl import replace_json
from ft_hsdp.launch.run.directory import RunDir
from tests.support.answering import Answering
from tests.support.launch.launch_rows import written
from tests.support.lighthouse.signed import proved


class Handler(Answering):
    run: RunDir

    def do_GET(self) -> None:
        self._answer({"step": 0, "epoch": 0, "replicas": []} if self.path == "/v1/status" else {})

    def do_POST(self) -> None:
        said = json.loads(self.body())
        telemetry = self.path == "/v1/telemetry"
        name = "telemetry.jsonl" if telemetry else "pictures.jsonl"
        written(self.run.path / name, said if telemetry else said["body"])
        if telemetry:
            self._answer(None)
            return
        about = {"epoch": 1, "step": 0, "finished": False, "halted": ""}
        self._answer({"type": "Overview", "body": {**about, "drained": []}})

    def _answer(self, value: Any) -> None:
        answer = httpx.Response(204) if value is None else httpx.Response(200, json=value)
        answer = proved(answer, self.headers["Authorization"], self.run.token.read_text().strip())
        self.answer(answer.status_code, answer.content, {HEADER: answer.headers[HEADER]})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--fd", type=int, required=True)
    args = parser.parse_args()
    if (args.run / "no-lighthouse").exists():
        raise SystemExit("no lighthouse today")
    Handler.run = RunDir(args.run)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
    server.socket = socket.socket(fileno=args.fd)
    server.server_address = server.socket.getsockname()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    replace_json(Handler.run.lighthouse, {"pid": os.getpid(), "url": url})
    server.serve_forever()


if __name__ == "__main__":
    main()

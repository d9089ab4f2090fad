"""A webhook of people, in this process."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SECRET = "T0/B0/hunter2"


class Webhook(ThreadingHTTPServer):
    """Answers with each of ``codes`` once, and then with 200; 0: not before `go`."""

    daemon_threads = True

    def __init__(self, *codes: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.codes, self.got, self.go = list(codes), list[dict[str, Any]](), threading.Event()
        self.paths: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_port}/services/{SECRET}"


class _Handler(BaseHTTPRequestHandler):
    server: Webhook

    def do_POST(self) -> None:
        server = self.server
        server.paths.append(self.path)
        assert self.headers["Content-Type"] == "application/json"
        server.got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        code = server.codes.pop(0) if server.codes else 200
        if not code:
            server.go.wait()
        self.send_response(code or 200)
        self.send_header("Location", f"{server.url}/elsewhere")
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


@contextmanager
def webhook(*codes: int) -> Iterator[Webhook]:
    with Webhook(*codes) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.go.set()
            server.shutdown()
            thread.join()

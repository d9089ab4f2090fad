"""It listens in a lighthouse's place without the token, keeps what it gets, and answers with lies."""

from __future__ import annotations

import itertools
import json
import threading
from http.server import ThreadingHTTPServer

from ft_hsdp import protocol
from ft_hsdp.core.grant import Continue, Finish, Refused
from tests.support.answering import Answering

REPLICAS = 3
LIES = {"epoch": 9, "step": 900, "finished": True, "halted": "a lie", "drained": list(range(REPLICAS))}
QUORUM = (Refused("a lie", 64), Finish(), Continue(10**6, 10**6))
STATUSES = (200, 200, 401, 403, 410, 422, 503, 302)


class Squatter(Answering):
    server: SquatterServer

    def do_GET(self) -> None:
        self._lie(json.dumps(LIES).encode())

    def do_POST(self) -> None:
        body = self.body()
        self.server.seen.append((self.path, str(self.headers), body))
        turn = next(self.server.turns)
        quorum = self.path == "/v1/quorum"
        self._lie(protocol.encode(QUORUM[turn % 3]) if quorum else self._lies(body), STATUSES[turn % 8])

    def _lies(self, body: bytes) -> bytes:
        """What would end each incarnation that a supervisor reports."""
        try:
            running = json.loads(body)["body"]["running"]
        except (ValueError, KeyError, TypeError):
            running = {}
        evict = [{"replica": int(r), "incarnation": n, "reason": "a lie"} for r, n in running.items() if n]
        return json.dumps({"type": "Overview", "body": {**LIES, "evict": evict}}).encode()

    def _lie(self, body: bytes, status: int = 200) -> None:
        proof, cookie = f"{'0' * 32} {'0' * 64}", f"x={'y' * 4000}"
        self.answer(status, body, {"FT-HMAC": proof, "Set-Cookie": cookie, "Location": "http://127.0.0.1:1/"})


class SquatterServer(ThreadingHTTPServer):
    """A context: it listens at ``port`` of loopback (0: any)."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        self.seen: list[tuple[str, str, bytes]] = []  # path, headers and body of each POST
        self.turns = itertools.count()
        super().__init__(("127.0.0.1", port), Squatter)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def server_close(self) -> None:
        """Also when the context is left."""
        self.shutdown()
        super().server_close()

    def asked(self, path: str) -> int:
        """How many requests for a path have come."""
        return sum(seen == path for seen, _, _ in self.seen)

"""What the tests of the page share: a server in its own process, and a page that must stay clean."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import Browser, Page, expect

from ft_hsdp import address, protocol
from ft_hsdp.core.host_report import HostReport
from ft_hsdp.protocol import ProcessReport, RankBeat, Telemetry
from lighthouse.journal.database import SqliteDatabase
from lighthouse.overview.overview import JournalEntry
from tests.support.lighthouse.day import START, write_day
from tests.support.lighthouse.guarded import REPLICAS
from tests.support.lighthouse.lighthouse_helpers import TOKEN
from tests.support.lighthouse.signed import BlockingProof
from tests.support.lighthouse.site import KEY
from tests.support.waiting import until

ROOT = Path(__file__).parents[3]
WAIT_S = 15.0

expect.set_options(timeout=WAIT_S * 1000)


def write_past(path: Path, hours: float) -> None:
    """A day of ``hours`` that ends a second ago, in a new database."""
    write_day(path, REPLICAS, hours, time.time() - 1.0 - START - hours * 3600)


class Server:
    """The process; `kill` and `start` may follow each other, on the same port and database.

    The port is held while there is no process: another worker's server, which answers alike, must not get it.
    """

    def __init__(self, database: Path) -> None:
        self._database = database
        self._port = address.bound("127.0.0.1")
        self.port = int(self._port.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.key = KEY
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it, and wait until it serves."""
        told = json.dumps({"database": str(self._database), "port": self.port})
        command = [sys.executable, "-m", "tests.support.lighthouse.guarded", told]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        until(self._serves)

    def _serves(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, "the server ended"
        try:
            return httpx.get(self.url, timeout=2.0, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        """SIGKILL, and the port is free."""
        self.kill()
        self._port.close()

    def grow(self, rows: int, row: Any) -> None:
        """``rows`` events more in the database, while nobody serves it; ``row(n)`` makes one."""
        database = SqliteDatabase(self._database)
        database.append([JournalEntry(database.last + 1 + n, "event", row(n)) for n in range(rows)])
        database.close()

    def tell(
        self,
        replica: int,
        *events: dict[str, Any],
        commits: tuple[dict[str, Any], ...] = (),
        logged: tuple[dict[str, Any], ...] = (),
        ranks: tuple[RankBeat, ...] = (),
    ) -> None:
        body = protocol.encode(Telemetry(f"{replica}-run-0", events, commits, ranks, logged=logged))
        answer = httpx.post(f"{self.url}/v1/telemetry", content=body, auth=BlockingProof(TOKEN), trust_env=False)
        assert answer.status_code == 204, answer.text

    def report(self, host: str, replica: int | None = None) -> None:
        """Have the agent of a host, which takes ranks of one replica or of each, report once."""
        agent = HostReport(host, "a", "here", 1, "127.0.0.1:29500", replica=replica)
        body = protocol.encode(ProcessReport(host=agent))
        httpx.post(f"{self.url}/v1/processes", content=body, auth=BlockingProof(TOKEN), trust_env=False)


@dataclass
class Seen:
    """What a page did beside what it showed."""

    console: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)


def open_page(browser: Browser, url: str, seen: Seen, **context: Any) -> Iterator[Page]:
    """A page in a context of its own; whatever it complains about goes to ``seen``."""
    made = browser.new_context(viewport=context.pop("viewport", {"width": 1440, "height": 1000}), **context)
    made.add_init_script(
        "addEventListener('securitypolicyviolation', e => console.error('CSP', e.violatedDirective, e.blockedURI))"
    )
    page = made.new_page()
    page.on("console", lambda m: seen.console.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: seen.console.append(str(error)))

    def requested(request: Any) -> None:
        seen.asked.append(request.url)
        if not request.url.startswith(url):
            seen.foreign.append(request.url)

    page.on("request", requested)
    yield page
    made.close()


def state(page: Page, expression: str) -> Any:
    """A value of the page's own store, as `s`; `windowOf` is at hand."""
    module = "import('/assets/store.js')"
    return page.evaluate(
        f"{module}.then(({{store, windowOf}}) => {{ const s = store.get(); return {expression} }})"
    )

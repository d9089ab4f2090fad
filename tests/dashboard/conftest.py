"""One real browser for all tests of the page, and a lighthouse for it to show."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Playwright, sync_playwright

from tests.support.lighthouse.page_helpers import Seen, Server, open_page, write_past
from tests.support.lighthouse.site import KEY
from tests.support.programs import program

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)


class _Running:
    """The browser while tests of the page run."""

    playwright: Playwright | None = None
    browser: Browser | None = None


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Close the browser after the last test here: Playwright holds an event loop that others must not find."""
    if nextitem is not None and Path(__file__).parent in nextitem.path.parents:
        return
    if _Running.browser is not None and _Running.playwright is not None:
        _Running.browser.close()
        _Running.playwright.stop()
        _Running.browser = _Running.playwright = None


@pytest.fixture(scope="module")
def browser() -> Browser:
    """Debian's Chromium, started once."""
    path = program("chromium", "chromium")
    if _Running.browser is None:
        _Running.playwright = sync_playwright().start()
        _Running.browser = _Running.playwright.chromium.launch(executable_path=path, args=FLAGS.split())
    return _Running.browser


@pytest.fixture(scope="session")
def past(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The journal of two hours of 20 replicas."""
    path = tmp_path_factory.mktemp("past") / "journal.sqlite"
    write_past(path, 2)
    return path


@pytest.fixture(scope="session")
def shared(past: Path) -> Iterator[Server]:
    server = Server(past)
    yield server
    server.close()


@pytest.fixture(scope="module")
def own(past: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A lighthouse for one module, which may tell it things and kill it."""
    folder = tmp_path_factory.mktemp("own")
    for file in past.parent.glob("journal.sqlite*"):
        shutil.copy(file, folder)
    server = Server(folder / "journal.sqlite")
    yield server
    server.close()


@pytest.fixture
def seen() -> Seen:
    """What the page did beside what it showed."""
    return Seen()


@pytest.fixture
def blank(browser: Browser, shared: Server, seen: Seen, request: Any) -> Iterator[Page]:
    """An empty page; at the end it has complained about nothing, and asked nobody else."""
    options = getattr(request, "param", {})
    yield from open_page(browser, shared.url, seen, **options)
    assert not seen.console
    assert not seen.foreign


@pytest.fixture
def page(blank: Page, shared: Server) -> Page:
    blank.goto(f"{shared.url}/#key={KEY}")
    blank.wait_for_selector(".lane-canvas")
    return blank

import re

import pytest
from playwright.sync_api import expect

from tests.support.lighthouse.page_helpers import KEY, Seen, Server, open_page, write_past
from tests.support.waiting import until

PHONE = {"viewport": {"width": 400, "height": 800}}


@pytest.fixture
def whole_day(browser, tmp_path):
    """A page, not opened yet, of a lighthouse that has a day behind it."""
    write_past(tmp_path / "journal.sqlite", 24)
    server = Server(tmp_path / "journal.sqlite")
    seen = Seen()
    pages = open_page(browser, server.url, seen)
    yield next(pages), server
    next(pages, None)
    server.close()
    assert not seen.console
    assert not seen.foreign


@pytest.mark.proof
def test_a_day_of_twenty_replicas_is_painted(whole_day, capsys):
    page, server = whole_day
    mark = "performance.getEntriesByName('ft:painted')"
    for when in ("just started", "up"):
        page.goto("about:blank")
        page.goto(f"{server.url}/#key={KEY}")
        until(lambda: page.evaluate(f"{mark}.length"))
        painted = page.evaluate(f"{mark}[0].startTime")
        with capsys.disabled():
            print(f"\na day of 20 replicas, lighthouse {when}: painted in {painted:.0f} ms")
    assert page.locator(".lane-name").count() == 20
    for label in ("step", "rate", "epoch", "healthy", "units", "effective time", "lr scale"):
        expect(page.locator(".facts")).to_contain_text(label)
    expect(page.locator(".u-over")).to_have_count(5)
    assert colours(page) > 50


def colours(page):
    """How many different colours the lanes show: an empty canvas has one."""
    return page.evaluate(
        """() => {
            const canvas = document.querySelector('.lane-canvas');
            const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
            return new Set(new Uint32Array(data.buffer)).size;
        }"""
    )


def background(page):
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def brightness(colour):
    return sum(map(int, re.findall(r"\d+", colour)[:3])) / 3


@pytest.mark.parametrize("blank", [{"color_scheme": "dark"}], indirect=True)
def test_dark_is_what_the_system_says(page):
    assert brightness(background(page)) < 40


def test_light_is_light_and_the_switch_stays(page):
    assert brightness(background(page)) > 200
    page.get_by_role("button", name="Switch to the dark theme").click()
    assert brightness(background(page)) < 40
    page.reload()
    page.wait_for_selector(".lane-canvas")
    assert brightness(background(page)) < 40


@pytest.mark.parametrize("blank", [PHONE], indirect=True)
def test_a_phone_needs_no_sideways_scroll(page):
    def fits():
        return page.evaluate("document.documentElement.scrollWidth") == 400

    assert fits()
    lanes = page.locator(".lane-frame").bounding_box()
    assert lanes["width"] > 300
    page.locator(".lane-name").nth(2).click()
    sheet = page.locator(".drawer").bounding_box()
    assert sheet["width"] == 400
    assert sheet["y"] + sheet["height"] == pytest.approx(800, abs=30)
    assert fits()
    page.get_by_role("button", name="evict", exact=True).click()
    dialog = page.get_by_role("dialog").bounding_box()
    assert dialog["x"] >= 0
    assert dialog["x"] + dialog["width"] <= 400


def test_every_control_has_a_name(page):
    page.locator(".lane-name").nth(2).click()
    nameless = page.evaluate(
        """() => [...document.querySelectorAll('button, input, select, a, [tabindex="0"]')].filter(e =>
            !e.textContent.trim() && !e.getAttribute('aria-label') && !e.labels?.length).map(e => e.outerHTML)"""
    )
    assert nameless == []

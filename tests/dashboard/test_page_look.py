import re

import pytest

PHONE = {"viewport": {"width": 400, "height": 800}}


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

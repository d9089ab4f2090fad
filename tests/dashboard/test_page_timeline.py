"""Lanes and charts: one axis, one cursor, one zoom; the pointer and the keyboard explain."""

import pytest
from playwright.sync_api import expect

from tests.support.lighthouse.guarded import REPLICAS
from tests.support.lighthouse.page_helpers import state
from tests.support.waiting import until


@pytest.fixture
def frame(page):
    return page.locator(".lane-frame").bounding_box()


def drag(page, box, start, end, y):
    page.mouse.move(box["x"] + box["width"] * start, y)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * (start + end) / 2, y)
    page.mouse.move(box["x"] + box["width"] * end, y)
    page.mouse.up()


def cursors(page):
    """Where the line stands in the lanes and in each chart, as shares of the width."""
    return page.evaluate(
        """() => [...document.querySelectorAll('.cursor-line, .u-cursor-x')].map(line => {
            const host = line.parentElement.getBoundingClientRect();
            return (line.getBoundingClientRect().left - host.left) / host.width;
        })"""
    )


def test_a_drag_zooms_lanes_and_charts_and_a_double_click_ends_it(page, frame, seen):
    before = state(page, "windowOf(s)")
    drag(page, frame, 0.25, 0.5, frame["y"] + 100)
    until(lambda: state(page, "s.zoom"))
    start, end = state(page, "windowOf(s)")
    width = before[1] - before[0]
    assert start == pytest.approx(before[0] + 0.25 * width, abs=0.01 * width)
    assert end == pytest.approx(before[0] + 0.5 * width, abs=0.01 * width)
    until(lambda: any("start=" in url and "end=" in url for url in seen.asked))
    page.mouse.move(frame["x"] + frame["width"] * 0.7, frame["y"] + 100)
    until(lambda: cursors(page)[1] > 0)
    assert cursors(page) == pytest.approx([0.7] * 6, abs=0.01)
    box = page.locator(".u-over").nth(0).bounding_box()
    page.mouse.dblclick(box["x"] + 50, box["y"] + 20)
    until(lambda: state(page, "s.zoom") is None)


def test_a_pointer_on_a_chart_moves_every_cursor_and_every_value(page):
    box = page.locator(".u-over").nth(1).bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 20)
    until(lambda: cursors(page)[0] > 0)
    assert cursors(page) == pytest.approx([0.4] * 6, abs=0.01)
    expect(page.locator(".readout.pointed")).to_have_count(5)


def test_the_pointer_explains_a_failure(page, frame):
    failure = state(page, "s.overview.failures.at(-1)")
    start, end = state(page, "windowOf(s)")
    x = frame["x"] + frame["width"] * (failure["t"] - start) / (end - start)
    page.mouse.move(x, frame["y"] + 20 + failure["replica"] * 18 + 9)
    expect(page.locator(".tip")).to_contain_text(f"Failure of replica {failure['replica']}")
    page.mouse.down()
    page.mouse.up()
    assert state(page, "s.failure") == failure["seq"]
    expect(page.locator(".phases-head")).to_contain_text(f"Replica {failure['replica']}")


def test_the_keyboard_walks_and_explains(page):
    page.locator(".lane-frame").focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator(".tip")).to_contain_text("Replica 1")
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".tip-state")).to_be_visible()
    page.keyboard.press("Enter")
    expect(page.locator(".drawer h2")).to_have_text("Replica 1")
    page.keyboard.press("Escape")
    expect(page.locator(".drawer")).to_have_count(0)


def test_a_span_follows_the_end(page):
    page.get_by_role("button", name="15 min").click()
    start, end = state(page, "windowOf(s)")
    assert end - start == pytest.approx(900)
    until(lambda: state(page, "s.overview.series.t[0]") > start - 60)


def test_lanes_recovery_and_effective_time_show_the_overview(page):
    expect(page.locator(".lane-name")).to_have_count(REPLICAS)
    failure = state(page, "s.overview.failures.at(-1)")
    names = [phase["name"].replace("_", " ") for phase in failure["phases"]]
    assert page.locator(".phase-name").all_inner_texts() == names
    assert {"quorum", "reconnect", "boot", "fetch"} <= set(names)
    known = state(page, "s.overview.failures.map(f => f.phases.some(p => p.name === 'detect'))")
    assert True in known, "injected failures have a time of detection"
    assert ("detect" in names) is known[-1], "what was not measured is not shown"
    lost = state(page, "s.overview.effective.lost_s")
    ratio = f"{100 * state(page, 's.overview.effective.predicted'):.2f}"
    assert ratio in page.locator(".effective header").inner_text()
    rows = page.locator(".causes tbody th").all_inner_texts()
    assert rows[0] == "useful"
    assert set(rows[1:]) == {cause for cause, seconds in lost.items() if seconds > 0}

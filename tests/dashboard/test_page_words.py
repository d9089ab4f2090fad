import pytest

from tests.support.lighthouse.page_helpers import Seen, open_page
from tests.support.lighthouse.site import KEY


@pytest.fixture(scope="module")
def page(browser, shared):
    pages = open_page(browser, shared.url, Seen())
    page = next(pages)
    page.goto(f"{shared.url}/#key={KEY}")
    yield page
    next(pages, None)


def ask(page, module, expression):
    return page.evaluate(f"import('/assets/{module}').then(m => {expression})")


@pytest.mark.parametrize(
    ("module", "numbers", "how", "said"),
    [
        (
            *("time.js", "0.0123, 0.9999, 9.994, 59.97, 61, 3725, 90061, null, -2", "m.span"),
            "12 ms, 1.00 s, 9.99 s, 1 min 00 s, 1 min 01 s, 1 h 02 min, 1 d 01 h, \u2013, \u22122.00 s",
        ),
        (
            *("time.js", "0, 0.95, 9999, 84074, 2013000, 3.21e9, null", "n => m.short(n)"),
            "0, 0.95, 10000, 84.1 k, 2.01 M, 3.21 G, \u2013",
        ),
        (
            *("charts.js", "0.00838, 6.4, 1e-7, 0, null", "m.CHARTS.find(c => c.name === 'gbps').value"),
            "8.38 MB/s, 6.4 GB/s, 100 B/s, 0, \u2013",
        ),
    ],
    ids=["durations", "large numbers", "rates of bytes"],
)
def test_numbers_have_the_digits_that_matter_and_the_unit_that_suits_them(page, module, numbers, how, said):
    assert ask(page, module, f"[{numbers}].map({how}).join(', ')") == said


def test_ticks_are_round_and_within(page):
    day, step = 1_780_000_000, 10_800
    assert ask(page, "time.js", f"m.tickStep({day}, {day} + 86400, 800)") == step
    found = ask(page, "time.js", f"m.ticks({day}, {day} + 86400, {step})")
    assert len(found) == 8
    assert all(day <= t <= day + 86400 for t in found)
    assert ask(page, "time.js", f"m.tickLabel({found[0]}, {step})").endswith(":00")


def test_a_series_grows_by_a_commit_and_is_cut_at_a_time(page):
    counts = "healthy: [2, 2], units: [6, 6]"
    series = f"{{t: [1, 2], step: [1, 2], loss: [3, null], gbps: [1, 1], {counts}, effective: [0.9, 0.8]}}"
    commit = "{t: 3, step: 3, loss: 2, ftar_bytes: 4e9, ftar_s: 2, contributors: [0], units: 5}"
    grown = ask(page, "series.js", f"m.extended({series}, {commit})")
    assert grown["t"] == [1, 2, 3]
    assert grown["gbps"] == [1, 1, 2]
    assert grown["healthy"] == [2, 2, 1]
    assert grown["units"] == [6, 6, 5]
    assert grown["effective"] == [0.9, 0.8, 0.8]
    assert ask(page, "series.js", f"m.extended({series}, {{t: 2}}).t") == [1, 2]
    assert ask(page, "series.js", f"m.until({series}, 1.5).loss") == [3]
    assert ask(page, "series.js", "[0, 1, 1.5, 2, 9].map(t => m.indexAt([1, 2], t))") == [-1, 0, 0, 1, 1]


def test_no_two_states_share_a_colour_and_a_pattern(page):
    looks = ask(page, "states.js", "Object.values(m.inks(1)).map(l => l.fill + ' ' + l.pattern)")
    assert len(looks) == len(set(looks)) == 12
    patterns = ask(
        page, "states.js", "Object.entries(m.STATES).filter(([n]) => n !== 'final').map(([, s]) => s.pattern)"
    )
    assert len(patterns) == len(set(patterns))

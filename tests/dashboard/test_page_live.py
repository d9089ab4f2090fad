import hashlib
import time

import pytest
from playwright.sync_api import expect

from tests.support.lighthouse.lighthouse_helpers import commit_row
from tests.support.lighthouse.page_helpers import Seen, open_page, state
from tests.support.waiting import until


@pytest.fixture
def live(browser, own):
    seen = Seen()
    pages = open_page(browser, own.url, seen)
    page = next(pages)
    page.goto(f"{own.url}/#key={own.key}")
    expect(page.locator(".connection")).to_have_text("live")
    until(lambda: page.locator(".rows .row").count() > 20)
    yield page
    assert not seen.foreign
    assert [text for text in seen.console if "ERR_" not in text] == []  # the browser's words while it was away
    next(pages, None)


def said(n):
    return {"t": time.time(), "event": "StepRetried", "reason": f"said {n}", "rank": 0, "step": n}


def commit(step):
    lineage = hashlib.sha256(str(step).encode()).hexdigest()[:32]
    return commit_row(step, t=time.time(), epoch=10_000, lineage=lineage, total=20, loss=1.2345)


def told(page, since=0):
    """The numbers in "said N" of the log from this test on, newest first."""
    rows = page.locator(".rows .row .why").filter(has_text="said ")
    found = [int(text.split()[1]) for text in rows.all_text_contents()]
    return [n for n in found if n >= since]


def test_a_commit_extends_head_and_charts(live, own):
    before = state(live, "s.overview.series.t.at(-1)")
    step = state(live, "s.overview.head.step") + 1
    own.tell(0, commits=(commit(step),))
    expect(live.locator(".facts")).to_contain_text(f"{step:,}")
    expect(live.locator(".facts")).to_contain_text("1.2345")
    until(lambda: state(live, "s.overview.series.t.at(-1)") > before)
    assert state(live, "s.overview.head.healthy") == 3


def test_a_value_that_a_loop_logs_gets_a_strip_of_its_own(live, own):
    strips = live.locator(".strip").count()
    row = {"t": time.time(), "step": 1, "epoch": 10_000, "values": {"eval/accuracy": 0.625}}
    own.tell(0, logged=(row,))
    expect(live.locator(".strip", has_text="eval/accuracy")).to_contain_text("0.625")
    assert live.locator(".strip").count() == strips + 1
    own.tell(0, logged=(row | {"values": {"eval_loss": 0.875}},))
    expect(live.locator(".strip", has_text="Loss")).to_contain_text("eval 0.8750")
    assert live.locator(".strip").count() == strips + 1, "the loss of an evaluation is in the chart of the loss"


def test_the_units_of_a_step_and_a_replica_on_standby_are_shown(live, own):
    step = state(live, "s.overview.head.step") + 1
    own.tell(0, commits=(commit(step) | {"units": 31, "units_wanted": 40},))
    expect(live.locator(".fact", has_text="units")).to_contain_text("31 of 40")
    expect(live.locator(".strip", has_text="Units")).to_contain_text("31")
    role = {"t": time.time() + 2, "event": "GrantAdopted", "reason": "more than are allowed", "role": "standby"}
    own.tell(5, {**role, "rank": 0, "epoch": 10_001})
    expect(live.locator(".lane-name").nth(5)).to_contain_text("standby")
    expect(live.locator(".fact", has_text="healthy")).to_contain_text("of 20, 1 on standby")
    expect(live.locator(".legend")).to_contain_text("standby")


def test_a_replica_with_fewer_ranks_says_so(live, own):
    own.tell(7, {"t": time.time() - 60, "event": "Shrunk", "reason": "1 of 2 ranks go on", "from": 2, "to": 1})
    until(lambda: state(live, "s.overview.lanes[7].widths.length"))
    live.locator(".lane-name").nth(7).click()
    expect(live.locator(".drawer .details")).to_contain_text("1 of 2")


def test_a_filter_holds_for_what_comes_live(live, own):
    live.get_by_label("Text", exact=True).fill("said 21")
    expect(live.get_by_text("no event passes the filter")).to_be_visible()
    own.tell(1, said(22), said(21))
    until(lambda: told(live) == [21])


def test_nothing_is_lost_or_doubled_over_a_killed_lighthouse(live, own):
    own.tell(1, said(31))
    until(lambda: told(live, 31) == [31])
    own.kill()
    expect(live.locator(".connection")).to_have_text("reconnecting")
    own.start()
    own.tell(1, said(32), said(33))
    own.tell(2, said(34))
    expect(live.locator(".connection")).to_have_text("live")
    until(lambda: told(live, 31) == [34, 33, 32, 31])
    own.tell(1, said(35))
    until(lambda: told(live, 31) == [35, 34, 33, 32, 31])


def test_what_is_too_much_to_stream_is_read_anew(live, own):
    own.kill()
    expect(live.locator(".connection")).to_have_text("reconnecting")
    own.grow(6000, lambda n: {**said(40_000 + n), "source": "replica", "replica": 1})
    own.start()
    until(lambda: told(live, 40_000)[:3] == [45_999, 45_998, 45_997])
    own.tell(1, said(50_000))
    until(lambda: told(live, 40_000)[:2] == [50_000, 45_999])


def test_text_from_a_replica_stays_text(live, own):
    own.tell(1, {**said(60), "reason": "<img src=/x onerror=alert(1)>", "<b>": "<i>"})
    expect(live.locator(".rows .row").first).to_contain_text("<img src=/x onerror=alert(1)>")
    expect(live.locator(".rows .row").first).to_contain_text("<b> <i>")
    assert live.locator(".rows img").count() == 0


def test_memory_is_bounded(live, own):
    for first in range(1000, 2000, 100):
        own.tell(1, *(said(n) for n in range(first, first + 100)))
    until(lambda: told(live)[:1] == [1999])
    shown = told(live, 1000)
    assert len(shown) == live.locator(".rows .row").count() == 800
    assert shown == list(range(1999, 1199, -1))

import re

import pytest
from playwright.sync_api import expect

from tests.support.lighthouse.lighthouse_helpers import ADMIN
from tests.support.lighthouse.page_helpers import open_page, state
from tests.support.waiting import until


@pytest.fixture
def drawer(page):
    page.locator(".lane-name").nth(3).click()
    found = page.get_by_role("complementary")
    expect(found).to_be_visible()
    return found


def order(page, drawer, action, token, reason="a fan is broken"):
    drawer.get_by_role("button", name=action, exact=True).click()
    dialog = page.get_by_role("dialog")
    if token:
        dialog.get_by_label("Admin token").fill(token)
    dialog.get_by_label("Reason").fill(reason)
    return dialog


def test_it_tells_everything_about_a_replica(page, drawer):
    expect(drawer.get_by_role("heading", level=2)).to_have_text("Replica 3")
    expect(drawer).to_contain_text("incarnation")
    replica = state(page, "s.overview.replicas[3]")
    expect(drawer).to_contain_text(replica["state"])
    expect(drawer.locator(".recent .row").first).to_be_visible()
    page.keyboard.press("Escape")
    expect(drawer).to_have_count(0)
    expect(page.locator(".lane-name").nth(3)).to_be_focused()


def test_it_tells_where_a_replica_runs_and_from_where_it_came_back(page, drawer):
    expect(drawer).to_contain_text("a/1/n3h0 (2 ranks)")
    assert state(page, "s.overview.replicas[3].restored") is None
    page.keyboard.press("Escape")
    expect(page.locator(".facts")).to_contain_text("copies2 protected")
    lost = next(r["replica"] for r in state(page, "s.overview.replicas") if r["restored"])
    page.locator(".lane-name").nth(lost).click()
    expect(drawer).to_contain_text(f"the memory of another replica (n{lost ^ 1}h0")
    expect(drawer).to_contain_text("54 MB, in 210 ms, 1 step lost")


def test_a_replica_that_lacks_copies_is_seen_and_who_keeps_them(browser, own, seen):
    for page in open_page(browser, own.url, seen):
        page.goto(f"{own.url}/#key={own.key}")
        copies = page.locator(".fact").filter(has_text="copies")
        expect(copies).to_have_text("copies2 protected")
        own.tell(3, {"event": "Unprotected", "reason": "not all shards of step 7 were in memory in time"})
        expect(copies).to_have_text("copiesunprotected")
        expect(copies).to_have_class("fact warn")
        expect(copies).to_have_attribute("title", re.compile("not all shards of step 7"))
        page.locator(".lane-name").nth(3).click()
        drawer = page.get_by_role("complementary")
        expect(drawer).not_to_contain_text("copies of its shards")
        hosts = [f"n3h{i}" for i in range(6)]
        keeps = {host: f"{2 * i}-{2 * i + 1}" if i else "1" for i, host in enumerate(hosts)}
        own.tell(3, {"event": "CopiesPlanned", "reason": "plan of epoch 2", "hosts": len(hosts), "keeps": keeps})
        shown = "rank 1 on n3h0, ranks 2-3 on n3h1, ranks 4-5 on n3h2, ranks 6-7 on n3h3, … (6 hosts)"
        expect(drawer).to_contain_text(f"copies of its shards{shown}")


def test_a_wrong_token_is_refused_and_forgotten(page, drawer, seen):
    dialog = order(page, drawer, "evict", "wrong")
    dialog.get_by_role("button", name="evict replica 3").click()
    expect(dialog.get_by_role("alert")).to_contain_text("not the admin's token")
    assert page.evaluate("sessionStorage.getItem('ft.admin')") is None
    dialog.get_by_role("button", name="cancel").click()
    expect(dialog).to_have_count(0)
    seen.console.clear()  # the browser's own words on the 401


def test_an_order_is_confirmed_carried_out_and_seen(browser, own, seen):
    own.report("near", 3)
    for page in open_page(browser, own.url, seen):
        page.goto(f"{own.url}/#key={own.key}")
        page.locator(".lane-name").nth(3).click()
        drawer = page.get_by_role("complementary")
        dialog = order(page, drawer, "evict", ADMIN)
        expect(dialog).to_contain_text("Evict replica 3?")
        expect(dialog).to_contain_text("The processes of replica 3 are ended")
        assert not any("/v1/admin" in url for url in seen.asked)
        dialog.get_by_role("button", name="evict replica 3").click()
        expect(drawer.locator(".notice")).to_contain_text("its host agents kill 3-")
        row = page.locator(".rows .row").filter(has_text="an operator evicts")
        expect(row).to_contain_text("a fan is broken")
        expect(drawer.locator(".recent")).to_contain_text("an operator evicts replica 3")
        assert not any(ADMIN in url for url in [*seen.asked, page.url])
        drained(page, drawer)
    assert not seen.console


def drained(page, drawer):
    """With the token known, drain asks for the reason alone; the drawer then offers to undo it."""
    dialog = order(page, drawer, "drain", "")
    expect(dialog.get_by_label("Admin token")).to_have_count(0)
    dialog.get_by_role("button", name="drain replica 3").click()
    expect(page.locator(".rows .row").filter(has_text="an operator drains")).to_be_visible()
    until(lambda: state(page, "s.asked") is None)


def test_what_is_impossible_is_said(page, drawer, seen):
    dialog = order(page, drawer, "checkpoint now", ADMIN)
    dialog.get_by_role("button", name="write checkpoint").click()
    expect(dialog.get_by_role("alert")).to_contain_text("nothing has been granted yet")
    seen.console.clear()  # the browser's own words on the 409

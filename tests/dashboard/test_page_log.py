import httpx
import pytest
from playwright.sync_api import expect

from tests.support.lighthouse.page_helpers import state
from tests.support.lighthouse.site import KEY
from tests.support.waiting import until


@pytest.fixture
def rows(page):
    found = page.locator(".rows .row")
    until(lambda: found.count() > 20)
    return found


def numbers(page):
    return page.locator(".rows .row").evaluate_all("rows => rows.map(r => Number(r.dataset.seq))")


def journal(shared, **query):
    headers = {"Authorization": f"Bearer {KEY}"}
    return httpx.get(f"{shared.url}/v1/events", params=query, headers=headers, trust_env=False).json()["events"]


def test_filter_by_replica_event_and_text(page, rows):
    replica = state(page, "s.overview.failures.at(-1).replica")
    own = {f"r{replica}", f"r{replica}.0", f"r{replica}.1"}
    page.get_by_label("Replica", exact=True).select_option(str(replica))
    until(lambda: set(page.locator(".rows .who").all_text_contents()) <= own)
    page.get_by_label("Event", exact=True).select_option("FetchCompleted")
    what = page.locator(".rows .what")
    until(lambda: set(what.evaluate_all("all => all.map(e => e.title)")) == {"FetchCompleted"})
    assert all(f"replica {replica} rank" in said and " fetched " in said for said in what.all_text_contents())
    page.get_by_label("Text", exact=True).fill("no row says this")
    expect(page.get_by_text("no event passes the filter")).to_be_visible()
    page.get_by_role("button", name="clear").click()
    until(lambda: len(set(page.locator(".rows .what").all_text_contents())) > 3)


def test_each_event_is_told_in_words_and_named(page, rows):
    """What it says stands where one reads first; its name, by which one filters, beside it."""
    told = rows.evaluate_all(
        "rows => rows.map(r => ['.what', '.facts-of b'].map(place => r.querySelector(place).textContent))"
    )
    assert len({name for _, name in told}) > 3
    for said, name in told:
        assert " " in said
        assert name not in said


def test_scrolling_reads_the_past_page_by_page(page, rows, shared):
    first = len(numbers(page))
    for _ in range(3):
        before = len(numbers(page))
        page.locator(".rows").evaluate("list => { list.scrollTop = list.scrollHeight }")
        until(lambda before=before: len(numbers(page)) > before)
    shown = numbers(page)
    assert len(shown) >= first + 3
    assert shown == [event["seq"] for event in journal(shared, limit=len(shown))][::-1]


def test_a_link_opens_at_its_row(page, rows, shared):
    old = journal(shared, after=0, limit=40)[20]
    page.goto(f"{shared.url}/#key={KEY}&event={old['seq']}")
    page.reload()
    row = page.locator(f'.row[data-seq="{old["seq"]}"]')
    expect(row).to_contain_class("named")
    expect(row).to_be_in_viewport()
    assert page.url.endswith(f"#event={old['seq']}")
    shown = numbers(page)
    assert shown == sorted(shown, reverse=True)
    assert old["seq"] in shown[5:]
    page.get_by_role("button", name="newest").click()
    newest = journal(shared, limit=1)[0]["seq"]
    until(lambda: numbers(page)[0] >= newest)


def test_a_failure_leads_to_its_row(page, rows):
    page.get_by_role("link", name="show in the log").click()
    expect(page.locator(".row.named")).to_be_in_viewport()

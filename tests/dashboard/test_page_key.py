from playwright.sync_api import expect

from tests.support.lighthouse.site import KEY


def test_key_leaves_the_address_and_stays_in_this_tab(page, shared, seen):
    assert page.url == f"{shared.url}/"
    assert page.evaluate("sessionStorage.getItem('ft.key')") == KEY
    assert page.evaluate("localStorage.length") == 0
    page.reload()
    page.wait_for_selector(".lane-canvas")
    assert any("/v1/overview" in url for url in seen.asked)
    assert not any(KEY in url for url in seen.asked)


def test_without_a_key_the_page_asks_for_one(blank, shared, seen):
    blank.goto(shared.url)
    field = blank.get_by_label("View key")
    field.fill("not the key")
    blank.get_by_role("button", name="open").click()
    expect(blank.get_by_text("That key was refused.")).to_be_visible()
    field.fill(KEY)
    field.press("Enter")
    expect(blank.get_by_role("heading", name="pretrain")).to_be_visible()
    refused = [text for text in seen.console if "401" in text]
    assert refused == seen.console  # the browser's own words on the two refusals
    seen.console.clear()

import httpx
from playwright.sync_api import expect

from tests.support.lighthouse.lighthouse_helpers import ADMIN
from tests.support.lighthouse.page_helpers import open_page
from tests.support.lighthouse.signed import BlockingProof


def test_machines_are_shown_and_one_that_is_drained_is_undrained(browser, own, seen):
    for page in open_page(browser, own.url, seen):
        page.goto(f"{own.url}/#key={own.key}")
        page.wait_for_selector(".lane-canvas")
        panel = page.get_by_role("region", name="Machines")
        expect(panel).to_have_count(0)
        own.report("zone/rack/near.example.org")
        own.report("zone/rack/far.example.org")
        expect(panel.get_by_role("row", name="near used r0 0\u20131 drain")).to_be_visible()
        url, order = f"{own.url}/v1/admin/hosts/far.example.org/drain", {"reason": "a new fan", "force": True}
        assert httpx.post(url, json=order, auth=BlockingProof(ADMIN), trust_env=False).is_success
        expect(panel.get_by_role("row", name="far leaving r1 0\u20131")).to_be_visible()
        expect(panel).to_contain_text("drained it: a new fan")
        panel.get_by_role("button", name="undrain far").click()
        page.get_by_label("Admin token").fill(ADMIN)
        page.get_by_label("Reason, for the journal").fill("it turns")
        page.get_by_role("button", name="undrain far.example.org").last.click()
        expect(panel).to_contain_text("2 used")
    assert not seen.console

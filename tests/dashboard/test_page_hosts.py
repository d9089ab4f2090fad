import httpx
from playwright.sync_api import expect

from ft_hsdp.protocol import RankBeat
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


def test_ranks_and_machines_show_what_they_use(browser, own, seen):
    own.report("near", 3)
    for page in open_page(browser, own.url, seen):
        page.goto(f"{own.url}/#key={own.key}")
        page.wait_for_selector(".lane-canvas")
        gpu = {"gpu_memory_used_bytes": 71.2e9, "gpu_memory_bytes": 80e9, "gpu_power_watts": 412.0, "gpu_xid": 79}
        host = {"host_memory_available_bytes": 1e9, "host_memory_bytes": 64e9, "host_run_free_bytes": 2e9}
        first = RankBeat(0, 7, "gpu7", 3, load={"rank_cpu_ratio": 0.97, "odd": 1.0, **gpu, **host})
        own.tell(3, ranks=(first, RankBeat(1, 8, "gpu7", 3, load={"rank_resident_bytes": 1.5e9})))
        panel = page.get_by_role("region", name="Machines")
        expect(panel.locator(".why")).to_have_text("free: 1 GB of 64 GB memory, 2 GB for the run")
        page.locator(".lane-name").nth(3).click()
        lines = page.get_by_role("complementary").locator(".load")
        expect(lines).to_have_text(["CPU 97 %, 71.2 of 80 GB, 412 W, Xid 79", "memory 1.5 GB"])
    assert not seen.console

import pytest
from playwright.sync_api import Page, expect

from tests.support.lighthouse.page_helpers import Seen, open_page
from tests.support.lighthouse.site import KEY

OURS = "ft_hsdp.train.model.Transformer"


def test_the_panel_shows_the_configuration(page: Page) -> None:
    panel = page.locator(".panel.run")
    for text in ("120,000 steps", "2 ranks", "rate unchanged; at least 1 replica", "on demand", "cpu, float32"):
        expect(panel).to_contain_text(text)
    expect(panel).not_to_contain_text("parameters")  # no replica has said what it trains


@pytest.mark.parametrize(
    ("model", "parameters", "said", "unsaid"),
    [
        ("own.Net", 12, ["Net, 12 parameters"], "width"),
        (OURS, 2_021_760, ["Transformer, 2.02 M", "6, width 192, 6 heads", "0.001, constant"], "Net"),
    ],
)
def test_a_warm_replica_says_what_it_trains(browser, own, model, parameters, said, unsaid) -> None:
    own.tell(3, {"event": "ReplicaWarmed", "model": model, "parameters": parameters})
    for page in open_page(browser, own.url, Seen()):
        page.goto(f"{own.url}/#key={KEY}")
        panel = page.locator(".panel.run")
        for text in said:
            expect(panel).to_contain_text(text)
        expect(panel).not_to_contain_text(unsaid)

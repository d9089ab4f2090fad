import hashlib
import re
import time

import pytest
from playwright.sync_api import expect

from ft_hsdp.core.traces import GroupTrace, RankId, RankTrace
from ft_hsdp.protocol import RankBeat
from tests.support.lighthouse.lighthouse_helpers import commit_row
from tests.support.lighthouse.page_helpers import open_page, state
from tests.support.waiting import until

BAD = "<img src=/x onerror=alert(1)>"
STACK = ("train.py:31 load_batch", f"train.py:90 {BAD}")


def commit(own, step):
    lineage = hashlib.sha256(str(step).encode()).hexdigest()[:32]
    own.tell(0, commits=(commit_row(step, t=time.time(), epoch=10_000, lineage=lineage, total=20, step_s=0.2),))


def hang(own):
    """Rank 1/1 has not begun what 1/0 waits in; the others of the ring wait for 1/0."""
    for replica in range(3):
        ranks = []
        for rank in range(2):
            inside = GroupTrace(f"{replica}:0", 8 - (replica == rank == 1), 7 + (replica != 1), "all_gather")
            left = RankId((replica - 1) % 3, rank)
            joined = 232 + (replica != 1)
            ring = GroupTrace(f"ring {rank} of epoch 1", joined, 232, "bucket 3", left, 5, 5, "left")
            groups = (inside, ring) if rank == 0 else (inside,)
            culprit = replica == rank == 1
            trace = RankTrace(groups, f"reads {BAD}" if culprit else "trains", STACK if culprit else ())
            ranks.append(RankBeat(rank, 4000 + rank, f"gpu7{BAD}" if culprit else "gpu1", 9, "", 6.5, trace))
        own.tell(replica, ranks=tuple(ranks))


@pytest.fixture
def live(browser, own, seen):
    pages = open_page(browser, own.url, seen)
    page = next(pages)
    page.goto(f"{own.url}/#key={own.key}")
    page.wait_for_selector(".lane-canvas")
    yield page
    assert not seen.console
    assert not seen.foreign
    next(pages, None)


def test_a_page_says_who_waits_for_whom_until_the_job_gets_on(live, own, seen):
    panel = live.get_by_role("region", name="Who waits for whom")
    step = state(live, "s.overview.head.step")
    commit(own, step + 1)
    expect(panel).to_have_count(0)
    live.keyboard.press("+")  # zoomed, it does not see by the overview that no step comes
    until(lambda: hang(own) or panel.locator(".findings li").count(), deadline_s=30.0)
    expect(panel.locator(".findings li")).to_have_count(1)
    expect(panel.locator(".suspect")).to_contain_text(f"replica 1 rank 1on gpu7{BAD}, pid 4001, reads {BAD}")
    expect(panel.locator("pre")).to_have_text("\n".join(STACK))
    expect(panel.locator(".waits")).to_contain_text(
        "0/0, 2/0 wait in bucket 3, number 233 of ring 0 of epoch 1 for 1/0"
    )
    assert panel.locator("img").count() == 0
    expect(panel.locator(".replicas li")).to_have_count(3)
    expect(panel.locator(".replicas .cell")).to_have_count(6)
    expect(panel.locator(".replicas .is-culprit")).to_have_attribute("title", re.compile("still for 6.50 s"))
    expect(panel.locator(".replicas .is-waits")).to_have_count(3)
    commit(own, step + 2)
    expect(panel.get_by_role("status")).to_have_text("nobody waits")
    expect(panel.locator(".findings li, .waits li")).to_have_count(0)
    panel.get_by_role("button", name="close").click()
    expect(panel).to_have_count(0)
    toggle = live.get_by_role("button", name="who waits")
    expect(toggle).to_be_focused()
    asked = len([url for url in seen.asked if "/v1/diagnosis" in url])
    live.keyboard.press("Enter")
    expect(panel.get_by_role("status")).to_have_text("nobody waits")
    live.wait_for_timeout(2500)
    assert len([url for url in seen.asked if "/v1/diagnosis" in url]) == asked + 1


def test_many_ranks_share_the_cells_of_a_replica(page):
    """The worst of each cell is shown."""
    script = """import('/assets/diagnosis.js').then(({cellsOf}) =>
        cellsOf([[0, 130, 9, 0, 'culprit'], [0, 3, 2, 0, 'waits'], [0, 131, 0, 0, ''], [0, 0, 0, 0, '']], 200)
            .map(r => r && r[1]))"""
    cells = page.evaluate(script)
    assert len(cells) == 50
    assert {n: rank for n, rank in enumerate(cells) if rank is not None} == {0: 3, 32: 130}


def test_a_page_that_sees_no_step_for_long_asks_and_shows_nothing_as_long_as_nothing_is_found(page, seen):
    until(
        lambda: page.wait_for_timeout(200) or sum("/v1/diagnosis" in url for url in seen.asked) >= 2,
        "it asks",
        30.0,
    )
    expect(page.get_by_role("region", name="Who waits for whom")).to_have_count(0)

"""Replay: the page of a run that is over, from its logs, with its time under a slider."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import expect

from ft_hsdp.config import load
from ft_hsdp.launch.run.directory import RunDir
from ft_hsdp.launch.run.page import recorded, serve_run
from tests.support.lighthouse.lighthouse_helpers import NOW, commit_row
from tests.support.lighthouse.page_helpers import Seen, open_page, state
from tests.support.refused import refused
from tests.support.waiting import until

T0, STEPS = NOW, 60
QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
SERVE = """
import sys
from pathlib import Path
from ft_hsdp.launch.run.page import serve_run
from ft_hsdp.launch.run.directory import RunDir
serve_run(RunDir(Path(sys.argv[1])), "127.0.0.1", 0, lambda link: print(link, flush=True))
print("ended")
"""


def row(replica, step):
    early = step <= STEPS // 2
    told = {"epoch": 1, "contributors": [0, 1, 2]} if early else {"epoch": 2, "contributors": [0, 1]}
    return commit_row(step, replica, t=T0 + step + replica / 100, loss=5.0 - step / 20, **told)


@pytest.fixture
def run(tmp_path):
    """A run of a minute: two replicas logged each step, and replica 2 died in the middle."""
    folder = tmp_path / "runs" / "quickstart"
    folder.mkdir(parents=True)
    run = RunDir(folder)
    run.config.write_text(QUICKSTART.read_text())
    for replica in (0, 1):
        lines = "".join(json.dumps(row(replica, step)) + "\n" for step in range(1, STEPS + 1))
        run.replica(replica).mkdir(parents=True)
        run.commits(replica).write_text(lines)
    started = {"event": "ReplicaStarted", "source": "supervisor", "reason": "first start"}
    events = [started | {"t": T0 + r / 10, "replica": r, "incarnation": f"{r}-run-0"} for r in range(3)]
    gone = {"source": "supervisor", "replica": 2, "incarnation": "2-run-0", "kind": "SIGKILL", "reason": "killed"}
    events.append({"t": T0 + 30.5, "event": "ProcessExited", "rank": 0, **gone})
    events.append({"t": T0 + 30.6, "event": "ReplicaExited", **gone})
    events.append({"t": T0 + 60.5, "event": "JobFinished", "source": "lighthouse", "reason": "step 60"})
    run.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    return run


def test_a_step_that_two_replicas_logged_is_one_commit(run):
    rows, about = recorded(run)
    kinds = [entry.kind for entry in rows]
    assert kinds.count("commit") == STEPS
    assert kinds.count("event") == 6
    assert about.live is False
    times = [entry.row["t"] for entry in rows]
    assert times == sorted(times)


def test_a_run_without_logs_is_refused_in_one_line(tmp_path):
    (tmp_path / "config.yaml").write_text(QUICKSTART.read_text())
    refused(lambda: recorded(RunDir(tmp_path)), "recorded")


def test_an_address_that_cannot_be_had_is_refused_in_one_line(run):
    refused(lambda: serve_run(run, "192.0.2.1", 0, print), "listen")


@pytest.fixture
def served(run):
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(run.path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    yield process, process.stdout.readline().strip()
    process.kill()
    process.communicate()


def test_the_slider_moves_everything_and_ctrl_c_ends_it(browser, served, run):
    process, link = served
    url = link.split("/#")[0]
    seen = Seen()
    pages = open_page(browser, url, seen)
    page = next(pages)
    page.goto(link)
    expect(page.locator(".connection")).to_have_text("replay")
    slider = page.get_by_label("Moment")
    expect(page.locator(".facts")).to_contain_text(f"60 of {load(run.config).train.steps:,}")
    expect(page.locator(".rows .row").first).to_contain_text("JobFinished")
    whole = state(page, "windowOf(s)")

    slider.focus()
    for _ in range(13):
        page.keyboard.press("PageDown")  # 5 % each
    until(lambda: state(page, "s.overview.head.step") == 21)
    assert any("at=" in asked for asked in seen.asked)
    expect(page.locator(".facts")).to_contain_text("21 of")
    until(lambda: page.locator(".rows .row").count() == 3)
    assert max(state(page, "s.overview.series.t")) <= state(page, "s.at")
    assert state(page, "s.overview.failures") == []
    assert state(page, "windowOf(s)") == whole

    box = slider.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.35, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + box["height"] / 2, steps=8)
    page.mouse.up()
    until(lambda: 33 <= state(page, "s.overview.head.step") <= 39)
    expect(page.locator(".failures")).to_contain_text("was killed by SIGKILL")

    page.get_by_label("Speed").select_option("60")
    page.get_by_role("button", name="play").click()
    until(lambda: state(page, "s.overview.head.step") == 60)
    expect(page.get_by_role("button", name="play")).to_be_visible()
    page.locator(".lane-name").nth(2).click()
    expect(page.get_by_role("button", name=re.compile("evict|drain|checkpoint"))).to_have_count(0)
    next(pages, None)
    assert not seen.console
    assert not seen.foreign

    process.send_signal(2)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out.strip(), err) == (0, "ended", "")

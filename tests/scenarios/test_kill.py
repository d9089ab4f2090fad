"""SIGKILL of real ranks in real jobs."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest

from tests.support.scenarios.scenario_job import HARD, Job, check

pytestmark = pytest.mark.multiproc


@pytest.mark.parametrize(
    ("seed", "kills", "steps", "train"),
    [
        pytest.param(1, 5, 60, {}, marks=pytest.mark.soak),
        pytest.param(2, 5, 60, {"data__assignment": "global"}, marks=pytest.mark.soak),
        pytest.param(3, 5, 60, HARD, marks=pytest.mark.soak),
        pytest.param(2, 2, 25, HARD, marks=pytest.mark.proof),
    ],
)
def test_kills_at_random_moments(
    tmp_path: Path, seed: int, kills: int, steps: int, train: dict[str, object]
) -> None:
    """Any rank of any replica, leaders included, as long as one replica is left to go on."""
    rng = random.Random(seed)
    with Job(tmp_path, steps, restart__budget=50, **train) as job:
        job.until(lambda: job.step() >= 3, "step 3")
        for _ in range(kills):
            goal = job.step() + rng.randint(0, 9)
            job.until(lambda goal=goal: job.step() >= goal, f"step {goal}")
            able = job.contributing()
            victims = [r for r in range(3) if len(able - {r}) >= 1]
            job.signal(rng.choice(victims), rng.randrange(2), signal.SIGKILL)
            dead = job.step()
            job.until(lambda dead=dead: job.step() > dead, "survivors commit")
        summary = job.end()
        check(summary, steps)
        survivors = {r for r in summary["replicas"] if summary["replicas"][r]["incarnations"] == 1}
        assert sum(r["incarnations"] - 1 for r in summary["replicas"].values()) == len(summary["failures"])
        assert all(f["kind"] == "SIGKILL" for f in summary["failures"]), (survivors, summary["failures"])
        verdict = job.replayed()
        assert verdict["equal"], verdict
        assert verdict["steps"] == steps


@pytest.mark.proof
def test_two_of_three_at_once(tmp_path: Path) -> None:
    """The last replica goes on alone, both others heal."""
    steps = 80  # they must last until both are back, on a fast machine, too
    with Job(tmp_path, steps) as job:
        job.until(lambda: job.step() >= 5, "step 5")
        for replica, rank in ((0, 0), (2, 1)):
            job.signal(replica, rank, signal.SIGKILL)
        summary = job.end()
        check(summary, steps)
        assert summary["replicas"]["1"]["incarnations"] == 1
        fed = [row["step"] for row in job.rows("replicas/1/fed.jsonl")]
        assert len(fed) == len(set(fed)), "the survivor repeated a forward"
        rows = job.rows("metrics.jsonl")
        assert [1] in [r["contributors"] for r in rows], "nobody trained alone"
        assert rows[-1]["contributors"] == [0, 1, 2], "not everybody came back"
        assert job.replayed()["equal"]


@pytest.mark.proof
def test_all_three_at_once(tmp_path: Path) -> None:
    """The state agents outlive the ranks: the job goes on where it was, although nobody is left who trained it."""
    with Job(tmp_path, 25, quorum__on_lost_head="halt") as job:
        job.until(lambda: job.step() >= 5, "step 5")
        for replica in range(3):
            job.signal(replica, replica % 2, signal.SIGKILL)
        check(job.end(), 25)
        restored = job.events("StateRestored")
        assert {e["replica"] for e in restored} == {0, 1, 2}
        lost = [e["steps"] for e in job.events("HeadRolledBack")]
        assert lost in ([], [1]), "more than the step of which no copy was complete yet"
        assert job.replayed()["equal"]


@pytest.mark.proof
@pytest.mark.parametrize("policy", ["halt", "rollback"])
def test_all_three_at_once_without_copies(tmp_path: Path, policy: str) -> None:
    """No copy of the state is left: the job ends with one clear reason, or begins again if it was told to."""
    with Job(tmp_path, 25, quorum__on_lost_head=policy, state__snapshot="on_demand") as job:
        job.until(lambda: job.step() >= 5, "step 5")
        for replica in range(3):
            job.signal(replica, replica % 2, signal.SIGKILL)
        if policy == "halt":
            summary = job.end(75)
            assert summary["lost"] == [0, 1, 2]
            assert len(job.events("JobHalted")) == 1
            return
        check(job.end(), 25)
        (rolled,) = job.events("HeadRolledBack")
        assert rolled["steps"] >= 5
        assert job.replayed()["equal"]

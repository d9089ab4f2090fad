"""Jobs whose replicas are tensor or expert parallel: 2 replicas x 4 ranks, one SIGKILL."""

from pathlib import Path
from typing import Any

import pytest

from tests.compatibility.cases import CASES
from tests.support.scenarios.scenario_job import ROOT, Job

STEPS, AT, VICTIM = 24, 6, 1
STEP_S = 0.5  # until the victim is back
KILL = {"at_step": AT, "replicas": [VICTIM], "rank": 2}
KINDS: dict[str, dict[str, Any]] = {
    "tensor_parallel": {"ranks_per_unit": 2, "quorum__batch": "constant", "data__assignment": "global"},
    "expert_parallel": {},
}


def job(folder: Path, kind: str, steps: int, **more: Any) -> Job:
    settings = {"replicas": 2, "ranks_per_replica": CASES[kind].ranks, "lr__intervention": "none"}
    script = str(ROOT / "tests" / "compatibility" / "script.py")
    settings |= {"entry": script, "args": [kind, str(folder / "weights.pt")], "optim__clip": None}
    return Job(folder, steps, **{**settings, **KINDS[kind], **more})


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["tensor_parallel", pytest.param("expert_parallel", marks=pytest.mark.soak)])
def test_a_killed_replica_heals_while_the_other_goes_on(tmp_path: Path, kind: str) -> None:
    slow = {"args": [kind, str(tmp_path / "weights.pt"), str(STEP_S)]}
    with job(tmp_path / "job", kind, STEPS, chaos=[KILL], **slow) as running:
        running.until(lambda: running.events("Rejoined", replica=VICTIM), "the victim contributes again")
        running.hurry()
        summary = running.ends_well(STEPS)
        assert [f["kind"] for f in summary["failures"]] == ["SIGKILL"]
        rows = running.rows("metrics.jsonl")
        data_ranks = 4 // CASES[kind].ranks_per_unit
        assert {row["units_wanted"] for row in rows} == {2 * data_ranks}
        constant = KINDS[kind].get("quorum__batch") == "constant"
        alone = [row for row in rows if row["contributors"] == [1 - VICTIM]]
        assert alone, "the other one went on"
        assert alone[-1]["units"] == (2 * data_ranks if constant else data_ranks)
        assert rows[-1]["contributors"] == [0, 1], "it contributes again"
        assert summary["batches"]["trained"] == sum(row["units"] for row in rows)

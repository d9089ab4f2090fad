"""Each kind of script in a job of 2 replicas x 2 ranks, beside plain torch; docs/compatibility.md tells it."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ft_hsdp.launch.cli import main as launcher
from tests.compatibility import plain, table
from tests.compatibility.cases import CASES, STEPS, Case
from tests.support.scenarios.scenario_job import Job

SCRIPT = Path(__file__).with_name("script.py")
QUICK = (
    "tied_list",
    "moe",
    "lora",
    "muon",
    "batch_norm",
    "exported",
)  # in `make proof`; all of them in `make compatibility`


def difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest difference of two weights, relative to the largest weight of that tensor."""
    assert ours.keys() == theirs.keys()
    found = 0.0
    for name, wanted in theirs.items():
        if wanted.numel():
            largest = float(wanted.float().abs().max())
            found = max(found, float((ours[name].float() - wanted.float()).abs().max()) / max(largest, 1e-3))
    return found


def cases() -> list[Any]:
    """The cases; `make proof` trains the quick ones, `make compatibility` all of them."""
    marks = {name: pytest.mark.proof if name in QUICK else pytest.mark.soak for name in CASES}
    return [pytest.param(name, case, id=name, marks=marks[name]) for name, case in CASES.items()]


@pytest.mark.multiproc
@pytest.mark.parametrize(("name", "case"), cases())
def test_a_job_trains_what_torch_trains(tmp_path: Path, name: str, case: Case) -> None:
    file = tmp_path / "weights.pt"
    settings = {key.replace(".", "__"): value for key, value in case.settings.items()}
    settings |= {"entry": str(SCRIPT), "args": [name, str(file)], "train__accumulate": case.accumulate}
    settings |= {"ranks_per_unit": case.ranks_per_unit}
    settings |= {"replicas": 2, "ranks_per_replica": case.ranks, "lr__intervention": "none", "optim__clip": None}
    if case.exported:
        settings["checkpoint__every"] = STEPS
    with Job(tmp_path, STEPS, **settings) as job:
        job.ends_at(STEPS)
        run = str(job.run)
    ours = torch.load(file, weights_only=True)
    if case.exported:
        assert launcher(["export", run, str(tmp_path / "exported.safetensors")]) == 0
        trained, ours = ours, load_file(tmp_path / "exported.safetensors")
        assert all(torch.equal(ours[name], tensor) for name, tensor in trained.items())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's compiler warns of its own code
        wanted = plain.train(case, 2, case.ranks // case.ranks_per_unit)
    found = difference(ours, wanted)
    assert found <= case.tolerance, f"{case.title}: {found:.1e}"


def test_the_page_tells_what_works_and_what_is_refused(mesh: DeviceMesh, tmp_path: Path) -> None:
    """`python -m tests.compatibility.table` writes the tables."""
    text = table.PAGE.read_text()
    assert table.works() in text
    messages = table.refusals(tmp_path)
    assert "not refused" not in messages.values()
    assert table.refused(messages) in text

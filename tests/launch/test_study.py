"""`study`: variants in real rank processes, which are trained once; and the bits of real runs with kills."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import study_speed
from ft_hsdp.launch import study
from ft_hsdp.launch.cli import main
from tests.support.scenarios.scenario_job import HARD, Job

TINY = {
    "replicas": 3,
    "ranks_per_replica": 1,
    "data": {"path": "text", "assignment": "global"},
    "model": {"dim": 32, "layers": 1, "heads": 2},
    "train": {"steps": 12, "seq_len": 16, "micro_batch": 1},
    "eval": {"every": 5, "batches": 2, "data": "text"},
}
LOST = {"failures": [1], "steps": [4], "lost": [2], "rate": ["none", "constant_batch"]}
ROOT = Path(__file__).parents[2]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_bytes(b"to be or not to be\n" * 5000)
    return tmp_path / "study.yaml"


def train(file: Path, capsys: pytest.CaptureFixture[str], **keys: Any) -> tuple[int, str]:
    file.write_text(yaml.safe_dump({"job": TINY, "variants": [LOST], "dir": "found"} | keys))
    code = main(["study", str(file), "--json", "--jobs", "2"])
    said = capsys.readouterr()
    return code, said.out or said.err


@pytest.mark.multiproc
def test_variants_are_trained_once(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = train(file, capsys)
    assert code == 0
    files = sorted(Path("found").glob("*.json"))
    assert [path.name for path in files] == [
        "d1x_fp32_for4_2reps_batch_constant-seed1.json",
        "d1x_fp32_for4_2reps_lr_none-seed1.json",
    ]
    found = [json.loads(path.read_text()) for path in files]
    assert [step for step, _ in found[0]["eval"]] == [5, 10, 12]
    constant, adapting = (each["units"] for each in found)
    assert adapting == [3, 1, 1, 1, 1, *[3] * 7]
    assert constant == [3, 1, *[3] * 10], "the lone replica trains three units from the step after on"
    before = [path.stat() for path in files]
    files[1].unlink()  # as if it had been killed on the way
    assert train(file, capsys)[0] == 0
    after = [path.stat() for path in files]
    assert [a.st_mtime_ns == b.st_mtime_ns for a, b in zip(before, after, strict=True)] == [True, False]
    assert json.loads(files[1].read_text())["digest"] == found[1]["digest"]
    assert sorted(path.name for path in Path("found").iterdir()) == [
        *(path.name for path in files),
        "variants.csv",
    ]
    files[0].unlink()
    (file.parent / "text").write_bytes(b"not to be is not to be\n" * 5000)
    code, said = train(file, capsys)
    assert (code, said.splitlines()[-1].partition("/d1x")[0]) == (64, "dir: got 'found"), said
    code, said = train(file, capsys, job=TINY | {"optim": {"lr": 0.002}})
    assert (code, said.count("\n")) == (64, 1)
    assert said.startswith("dir: got 'found/d1x")


@pytest.mark.parametrize(("name", "count"), [("configs/study.yaml", 73), ("docs/examples/study-moe.yaml", 4)])
def test_the_studies_in_the_docs_can_be_trained(name: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    found = study.cells(study.read(Path(name)))
    assert len(found) == len({cell.result for cell in found}) == count
    assert all(sum(each.last - each.first + 1 for each in cell.plan) == 1500 for cell in found)


def test_the_study_whose_speed_is_measured_can_be_trained(tmp_path: Path) -> None:
    found = study.cells(study_speed.two_variants(study_speed.shortened(40), tmp_path))
    assert [(cell.seed, cell.config.train.steps, cell.config.eval.every) for cell in found] == [
        (1, 40, 0),
        (2, 40, 0),
    ]


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"variants": []}, "variants"),
        ({"variants": [{"failures": [1], "lost": [3]}]}, "variants.0"),
        ({"variants": [{"failures": [3], "steps": [4]}]}, "variants.0"),
        ({"variants": [{"like": "runs/none"}]}, "variants.0.like"),
        ({"variants": [{"rates": ["sqrt"]}]}, "variants.0.rates"),
        ({"job": {"trains": 3}}, "trains"),
        ({"job": TINY | {"train": {"device": "cuda"}}}, "job.train.device"),
        ({"job": TINY | {"spares": 1}}, "job"),
        ({"job": TINY | {"lr": {"intervention": "sqrt"}}}, "job.lr.intervention"),
        ({"variants": [{"like": "runs/none", "lost": [1]}]}, "variants.0.like"),
    ],
)
def test_a_study_that_cannot_be_trained_is_refused_in_one_line(
    file: Path, capsys: pytest.CaptureFixture[str], keys: dict[str, Any], named: str
) -> None:
    code, said = train(file, capsys, **keys)
    assert (code, said.count("\n")) == (64, 1)
    assert said.startswith(f"{named}: got ")
    assert not Path("found").exists()


def kill(step: int, replica: int, down: int) -> dict[str, Any]:
    return {"at_step": step, "replicas": [replica], "rank": 0, "signal": "KILL", "down_steps": down}


CONSTANT = {"quorum__batch": "constant", "quorum__refill": "same_step", "lr__intervention": "none"}


@pytest.mark.multiproc
@pytest.mark.proof
@pytest.mark.parametrize(
    ("settings", "rate"),
    [({}, "sqrt"), (HARD | {"lr__intervention": "linear"}, "linear"), (CONSTANT, "constant_batch")],
)
def test_a_study_with_the_memberships_of_a_real_run_has_its_bits(
    tmp_path: Path, settings: dict[str, Any], rate: str
) -> None:
    chaos = [kill(6, 1, 4), kill(10, 2, 6), kill(18, 0, 2)]
    with Job(tmp_path, 30, chaos=chaos, **settings) as job:
        digests = {replica["digest"] for replica in job.end()["replicas"].values()}
        dumped = yaml.safe_load((job.run / "config.yaml").read_text())
    of_job = dumped | {"chaos": []}
    precision, seed = of_job["train"].pop("precision"), of_job["train"].pop("seed")
    del of_job["lr"]["intervention"], of_job["quorum"]["batch"]
    like = {"like": str(job.run), "rate": [rate], "precision": [precision], "seeds": [seed]}
    wanted = study.StudyConfig.model_validate({"dir": str(tmp_path / "found"), "job": of_job, "variants": [like]})
    (cell,) = study.run(wanted, None, lambda _: None)
    assert len(cell.history) >= 3, "there were not enough failures"
    assert {study.results([cell])[0]["digest"]} == digests

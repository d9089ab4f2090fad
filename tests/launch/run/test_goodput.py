"""`goodput`: of a run measured beside predicted, of a configuration, and what it refuses."""

import json
from pathlib import Path
from unittest import mock

import pytest

from ft_hsdp.analysis import prediction
from ft_hsdp.config import dump, parse
from ft_hsdp.launch.cli import main
from ft_hsdp.launch.run.directory import RunDir
from ft_hsdp.launch.run.recorder import done_by
from tests.support.launch.launch_rows import commit, event, written


def recorded(folder: Path, steps: int = 30) -> RunDir:
    """Steps of a second; replica 1 is away for three of them, the others stand still for 0.4 s."""
    run = RunDir(folder / "runs" / "job")
    run.path.mkdir(parents=True)
    config = parse(
        {"job": {"name": "job", "runs_dir": str(folder / "runs")}, "replicas": 3, "train": {"steps": steps}}
    )
    run.config.write_text(dump(config))
    who = {step: [0, 2] if 10 <= step < 13 else [0, 1, 2] for step in range(1, steps + 1)}
    rows = [commit(step, t=1000.0 + step + 0.4 * (step >= 10), who=who[step], lineage=f"{step:x}") for step in who]
    written(run.commits(0), *rows)
    written(run.commits(2), *({**row, "t": row["t"] + 0.01} for row in rows))
    life = {"replica": 1, "incarnation": "1-a-0"}
    written(
        run.events,
        event("FailureInjected", 1009.5, kind="SIGKILL", rank=0, pid=1, for_s=0.0, **life),
        event("ProcessExited", 1009.6, kind="SIGKILL", rank=0, **life),
        event("ReplicaExited", 1009.6, kind="SIGKILL", **life),
        event("EpochGranted", 1009.7, epoch=2, members=[0, 2], step=10),
        event("ReplicaStarted", 1010.0, replica=1, incarnation="1-a-1", how="cold"),
    )
    return run


def test_a_run_beside_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = recorded(tmp_path)
    plot, other = tmp_path / "restart.svg", tmp_path / "phases.json"
    assert main(["goodput", str(run.path), "--json", "--plot", str(plot)]) == 0
    text = capsys.readouterr().out
    found = json.loads(text)
    measured, predicted = found["measured"], found["predicted"]
    assert measured["useful_s"] == pytest.approx(29)
    assert measured["predicted"] == pytest.approx(predicted["useful_s"] / measured["wall_s"])
    assert predicted["useful_s"] == pytest.approx(29, abs=0.1)
    assert predicted["lost_s"]["missing"] == pytest.approx(1, abs=0.1)
    assert plot.read_text().startswith("<?xml")
    found["measured"]["settings"]["stall"] = {"detect": 6.0}  # of another run
    other.write_text(json.dumps(found))
    assert main(["goodput", "job", "--runs-dir", str(run.path.parent), "--phases", str(other)]) == 0
    cells = {
        line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if line[:2] == "  "
    }
    assert cells["detect"] == ["0.33%", "19.74%"]


def test_all_of_a_long_run_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(prediction, "rates", return_value=()):
        assert main(["goodput", str(recorded(tmp_path, 1100).path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["measured"]["useful_s"] == pytest.approx(1099)


def test_a_configuration_has_its_replicas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("replicas: 2\ncheckpoint: {every: 7}\n")
    assert main(["goodput", str(file), "--replicas=5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {rate["replicas"] for rate in found["rates"]} == {5}
    ours = next(iter(found["settings"]["systems"].values()))
    assert (found["measured"], ours["disk"], ours["replicas"]) == (None, {"every": 7}, 5)


@pytest.mark.parametrize(
    ("words", "key"),
    [(["--phases", "empty.json"], "--phases"), (["none"], "run"), (["runs/job", "--replicas=2"], "CONFIG")],
)
def test_what_is_refused(
    words: list[str], key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(tmp_path)
    (tmp_path / "empty.json").write_text('{"measured": null}')
    monkeypatch.chdir(tmp_path)
    assert main(["goodput", *words]) == 64
    assert capsys.readouterr().err.startswith(f"{key}: ")


def test_all_that_a_run_did_is_told_once_and_what_it_undid_too(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    undone = commit(2, lineage="X2", t=1002.0)
    written(run.commits(0), commit(1), undone, commit(2, epoch=2, t=1005.0), {"step": 3})
    written(
        run.commits(1), commit(1, t=1000.9, role="relay"), {**undone, "t": 1002.5}, commit(2, epoch=2, t=1004.9)
    )
    assert [(row["step"], row["lineage"], row["t"]) for row in done_by(run)] == [
        (1, "L1", 1001.0),
        (2, "X2", 1002.0),
        (2, "L2", 1004.9),
    ]

"""`sdc-check`: real ranks that train alone, or as one replica, twice; with and without a bit that flips."""

import json
from pathlib import Path
from typing import Any

import pytest

from ft_hsdp.launch.cli import main

ONE = "--ranks_per_replica=1"
FLIP = '--debug.failpoints={"state-flip": {replicas: [0], rank: 1, life: 1, step: 2}}'

SCRIPT = """
import torch
from ft_hsdp.train import join, trainer
job = join.expected_launch().config
build = trainer.build
trainer.build = lambda config: build(config) if torch.are_deterministic_algorithms_enabled() else None
trainer.train(job)
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_bytes(b"to be or not to be\n" * 5000)
    file = tmp_path / "c.yaml"
    file.write_text(
        "{data: {path: text}, model: {dim: 32, layers: 1, heads: 2}, train: {seq_len: 16, micro_batch: 1}}"
    )
    return file


def check(config: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    code = main(["sdc-check", str(config), "--steps", "3", "--json", *words])
    said = capsys.readouterr()
    return code, json.loads(said.out) if said.out else said.err


@pytest.mark.multiproc
def test_the_ranks_of_a_replica_train_the_same_bits_twice(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = check(config, capsys, "--together")
    assert (code, found["ok"], found["reproducible"]) == (0, True, True)
    assert len({digest for rank in found["digests"].values() for digest in rank}) == 2 * 4


@pytest.mark.multiproc
def test_a_bit_that_flips_in_one_pass_is_found(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = check(config, capsys, FLIP)
    expected = {"step": 2, "rank": 1, "tensor": "param embed.weight", "tensors": 1}
    assert (code, found["reproducible"], found["first_difference"]) == (76, False, expected)
    assert found["ranks"][0]["sets"] == [["rank 0", "rank 1"]], "in the other pass both have the same bits"


@pytest.mark.multiproc
def test_hosts_are_compared_by_what_they_have_written(
    config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    code, found = check(config, capsys, ONE, "--entry=train.py")
    assert (code, found["ok"]) == (0, True)
    wrong = {**found, "host": "wrong", "digests": {"0": [*found["digests"]["0"][:2], "x", "y"]}}
    other = {**found, "host": "other", "steps": 9}
    for n, each in enumerate([found, wrong, found, other, []]):
        (tmp_path / f"{n}.json").write_text(json.dumps(each))
    compare = ["sdc-check", "--json", "--compare"]
    assert main([*compare, "0.json", "2.json"]) == 0
    capsys.readouterr()
    assert main([*compare, "0.json", "1.json", "2.json"]) == 76
    assert json.loads(capsys.readouterr().out)["compared"][0]["outliers"] == {"wrong": 2}
    assert main([*compare, "0.json", "3.json", "4.json", "none.json"]) == 64
    refused = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in refused] == ["3.json", "4.json", "none.json"]
    assert "steps" in refused[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps", "101"], "--steps: got 101; allowed: 1 to train.steps (100)"),
        (["--compare", "c.yaml"], "sdc-check: got"),
        (["--ranks_per_unit=2"], "ranks_per_unit: got 2; allowed: 1,"),
        (["--data.path=none", ONE], "data.path: got 'none'"),
    ],
)
def test_what_cannot_be_tried_is_refused(
    config: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    code, line = check(config, capsys, *words)
    assert code == 64
    assert said in line

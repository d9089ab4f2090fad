from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ft_hsdp.launch.cli import main

GPU = str(Path(__file__).parents[2] / "configs/gpu.yaml")


@pytest.fixture(autouse=True)
def _no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_up_on_a_gpu_that_is_not_there_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", GPU]) == 64
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "train.device: got 'cuda'; allowed: cpu, for there is no GPU here" in lines[0]
    assert not list(tmp_path.iterdir())


def test_doctor_says_that_there_is_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", GPU, "--data.max_bytes=100000"]) == 64
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")]
    assert len(failed) == 1
    assert failed[0].split()[1] == "device"

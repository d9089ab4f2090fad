from pathlib import Path

import pytest
import torch

from ft_hsdp.config import load
from ft_hsdp.launch.cli import main
from ft_hsdp.launch.doctor import Bad, Subject, host

GPU = str(Path(__file__).parents[2] / "configs/gpu.yaml")


@pytest.fixture(autouse=True)
def _no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("command", [["up", GPU], ["replica", GPU, "--replica", "0", "--holder", "0"]])
def test_a_gpu_that_is_not_there_is_refused_in_one_line(tmp_path, capsys, command) -> None:
    assert main(command) == 64
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("train.device: got 'cuda'")
    assert not list(tmp_path.iterdir())


def test_the_doctor_says_that_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(Bad, match=r"train\.device: got 'cuda'"):
        host.device(Subject(load(Path(GPU))))

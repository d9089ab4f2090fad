"""Hugging Face models in a loop of our own: what is saved and exported is what was trained, bit for bit.

Run by `make integration-transformers`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from ft_hsdp.launch.cli import main
from tests.support.scenarios.scenario_job import Job

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]
LOOP = Path(__file__).with_name("transformers_export_loop.py")
STEPS = 4


def build(kind: str) -> Any:
    from tests.integrations.transformers_export_loop import build as made

    return made(kind)


def alike(one: Any, two: Any) -> None:
    assert one.keys() == two.keys()
    different = [name for name, tensor in one.items() if not torch.equal(tensor, two[name])]
    assert not different


@pytest.mark.parametrize("kind", ["tied", "lora"])
def test_what_is_saved_and_exported_is_what_was_trained(tmp_path, monkeypatch, kind) -> None:
    from peft import PeftModel
    from safetensors.torch import load_file, save_file
    from transformers import LlamaForCausalLM

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    preload = ["ft_hsdp.integrations.transformers", "peft"]  # so that not each rank has to import them
    settings = {"replicas": 2, "entry": str(LOOP), "args": [kind, str(tmp_path)], "checkpoint__every": 2}
    with Job(tmp_path, STEPS, preload=preload, **settings) as job:
        job.ends_at(STEPS)
        run = str(job.run)
    trained = {name: torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("inside", "after")}
    assert any(not torch.equal(t, trained["after"][n]) for n, t in trained["inside"].items())

    def loads(name: str, weights: Any) -> None:
        if kind == "lora":
            loaded = PeftModel.from_pretrained(build("base"), tmp_path / name)
        else:
            loaded = LlamaForCausalLM.from_pretrained(tmp_path / name)
            assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        alike(loaded.state_dict(), weights)

    for name, weights in trained.items():
        loads(name, weights)

    base: list[str] = []
    if kind == "lora":
        save_file(build(kind).state_dict(), tmp_path / "base.safetensors")
        base = ["--base", str(tmp_path / "base.safetensors")]
        assert main(["export", run, str(tmp_path / "adapters.safetensors")]) == 0
        adapters = load_file(tmp_path / "adapters.safetensors")
        assert set(adapters) == {name for name in trained["after"] if "lora" in name}
    for step, name in ((2, "inside"), (4, "after")):
        file = tmp_path / f"{step}.safetensors"
        assert main(["export", run, str(file), "--step", str(step), *base]) == 0
        model = build(kind)
        model.load_state_dict(load_file(file))
        alike(model.state_dict(), trained[name])
    model.save_pretrained(tmp_path / "from_export")
    loads("from_export", trained["after"])

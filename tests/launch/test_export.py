import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor, nn
from torch.nn import functional

from ft_hsdp import secret
from ft_hsdp.config import parse
from ft_hsdp.core.ledger import Ledger
from ft_hsdp.core.state_id import StateId
from ft_hsdp.launch.cli import main
from ft_hsdp.state.checkpoint.writer import Checkpointer, CheckpointOrigin, Header, Published
from ft_hsdp.state.replica_group import ReplicaGroup
from ft_hsdp.state.transfer.shard_manifest import Layout
from ft_hsdp.train.fsdp import frozen
from ft_hsdp.train.model import ModelArgs, Transformer
from ft_hsdp.train.state import packing

CONFIG = parse(
    {
        "model": {"dim": 16, "layers": 2, "heads": 4, "kv_heads": 2, "rope_theta": 500.0, "norm_eps": 1e-4},
        "train": {"seq_len": 24},
    }
)


def model(seed: int) -> Transformer:
    made = Transformer(ModelArgs.of(CONFIG.model, 257, CONFIG.train.seq_len), seed)
    for name, parameter in made.named_parameters():  # norms that are not 1, and outputs that are not small
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    return made


class Other(nn.Module):
    """A model of somebody's: tied, partly frozen, and with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.body = nn.Linear(3, 3).requires_grad_(False)
        self.half = nn.Linear(3, 2, dtype=torch.bfloat16)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([1.5, 2.5]))


def other(seed: int = 3) -> Other:
    torch.manual_seed(seed)
    return Other()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[int, Transformer]]]:
    """Steps 10 and 20 of a replica of one rank, and a folder of another model's."""
    top = tmp_path_factory.mktemp("export")
    mine = not dist.is_initialized()
    if mine:
        dist.init_process_group("gloo", init_method=f"file://{top / 'store'}", rank=0, world_size=1)
    ranks = ReplicaGroup()
    models = {}
    for folder, step, made in (("ck", 10, model(1)), ("ck", 20, model(2)), ("other", 1, other())):
        params = {n: p for n, p in made.named_parameters() if p.requires_grad}
        beside = frozen.tensors(made)
        named = frozen.described(beside, ranks), frozen.aliases(made, {**params, **beside})
        place = Layout.of(params, {})
        buffer = torch.empty(place.nbytes, dtype=torch.uint8)
        packing.pack(place, list(params.values()), buffer)
        about = CheckpointOrigin("0-a-0", 3, "hash", CONFIG.model_dump(mode="json"), 1, *named)
        checkpointer = Checkpointer(
            top / folder, 2, secret.make_checkpoint_key(None), about, place, params, {}, ranks
        )
        header = Header(StateId(1, step, "ab" * 16), Ledger((1, 2, 3)), ({"lr": 0.1},))
        assert isinstance(checkpointer.write(buffer, header).result(60), Published)
        checkpointer.close()
        if isinstance(made, Transformer):
            models[step] = made
    yield top / "ck", models
    if mine:
        dist.destroy_process_group()


def llama(config: dict[str, Any], weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Llama as Hugging Face's names and config.json define it; [batch, seq] -> [batch, seq, vocabulary]."""

    def norm(x: Tensor, name: str) -> Tensor:
        return (
            x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]) * weights[f"{name}.weight"]
        )

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].t()

    def rotate_half(x: Tensor) -> Tensor:
        return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)

    width, length = config["head_dim"], tokens.shape[1]
    rates = 1.0 / config["rope_theta"] ** (torch.arange(0, width, 2).float() / width)
    angles = torch.arange(length).float()[:, None] * rates
    cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()
    mask = torch.full((length, length), float("-inf")).triu(1)
    x = functional.embedding(tokens, weights["model.embed_tokens.weight"])
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        y = norm(x, f"{at}.input_layernorm")
        q, k, v = (linear(y, f"{at}.self_attn.{n}_proj").unflatten(2, (-1, width)).transpose(1, 2) for n in "qkv")
        q, k = (each * cos + rotate_half(each) * sin for each in (q, k))
        groups = config["num_attention_heads"] // config["num_key_value_heads"]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = (q @ k.transpose(2, 3) / width**0.5 + mask).softmax(-1)
        x = x + linear((scores @ v).transpose(1, 2).flatten(2), f"{at}.self_attn.o_proj")
        y = norm(x, f"{at}.post_attention_layernorm")
        gated = functional.silu(linear(y, f"{at}.mlp.gate_proj")) * linear(y, f"{at}.mlp.up_proj")
        x = x + linear(gated, f"{at}.mlp.down_proj")
    return linear(norm(x, "model.norm"), "lm_head")


@pytest.mark.parametrize(("step", "argv"), [(20, []), (10, ["--step", "10"])])
def test_what_is_exported_is_the_model(checkpoints, tmp_path, capsys, step, argv) -> None:
    folder, models = checkpoints
    assert main(["export", str(folder), str(tmp_path / "a" / "b"), *argv]) == 0
    count = sum(p.numel() for p in models[step].parameters())
    assert f"{count} parameters" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == ["config.json", "model.safetensors"]
    config = json.loads((tmp_path / "a" / "b" / "config.json").read_text())
    weights = load_file(tmp_path / "a" / "b" / "model.safetensors")
    assert sum(tensor.numel() for tensor in weights.values()) == count
    tokens = torch.randint(0, 257, (3, 24), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        exported, ours = llama(config, weights, tokens), models[step].logits(tokens)
    # Two programs add in different orders, and the order also depends on the number of threads.
    torch.testing.assert_close(exported, ours, rtol=1e-4, atol=1e-4)


def test_a_torn_one_is_passed_over_and_named(checkpoints, tmp_path, capsys) -> None:
    folder = shutil.copytree(checkpoints[0], tmp_path / "copy")
    (folder / "step-20-epoch-1-0-a-0" / "__0_0.distcp").write_bytes(b"")
    assert main(["export", str(folder), str(tmp_path / "out")]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert "step-20-epoch-1-0-a-0: __0_0.distcp" in first
    assert second.startswith("step 10: ")
    assert main(["export", str(folder), str(tmp_path / "other"), "--step", "10", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["step"] == 10
    assert err == ""


def test_what_another_key_signed_is_exported_to_whoever_trusts_it(checkpoints, tmp_path, capsys) -> None:
    folder, out, key = str(checkpoints[0]), tmp_path / "out", tmp_path / "key"
    key.write_text("of_somebody_else\n")
    key.chmod(0o600)
    assert main(["export", folder, str(out), "--key", str(key)]) == 64
    _, err = capsys.readouterr()
    assert "step-20-epoch-1-0-a-0'" in err
    assert not out.exists()
    assert main(["export", folder, str(out), "--trust"]) == 0


def base_of(model: nn.Module, file: Path) -> Path:
    """What a user began with: the whole model in a file, tied tensors once."""
    save_model(model, str(file))
    return file


def test_a_file_is_the_state_dict_of_any_model(checkpoints, tmp_path, capsys) -> None:
    folder, out = checkpoints[0].parent / "other", tmp_path / "made" / "model.safetensors"
    base = base_of(other(), tmp_path / "base.safetensors")
    assert main(["export", str(folder), str(out), "--base", str(base)]) == 0
    assert "52 parameters" in capsys.readouterr().out
    made = other(seed=4)
    made.load_state_dict(load_file(out))
    assert all(torch.equal(made.state_dict()[n], t) for n, t in other().state_dict().items())
    assert made.state_dict().keys() == load_file(out).keys()
    (one,) = folder.iterdir()  # one checkpoint instead of their folder
    assert main(["export", str(one), str(tmp_path / "same.safetensors"), "--base", str(tmp_path)]) == 0
    assert (tmp_path / "same.safetensors").read_bytes() == out.read_bytes()


def test_what_is_missing_is_said(checkpoints, tmp_path, capsys) -> None:
    folder, out = str(checkpoints[0].parent / "other"), tmp_path / "model.safetensors"
    assert main(["export", folder, str(out)]) == 0
    assert "body.bias and 2 more" in capsys.readouterr().out
    assert main(["export", folder, str(tmp_path / "again.safetensors"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["missing"] == ["body.bias", "body.weight", "scale"]
    found = other(seed=4).load_state_dict(load_file(out), strict=False)
    assert (sorted(found.missing_keys), found.unexpected_keys) == (["body.bias", "body.weight", "scale"], [])


@pytest.mark.parametrize("named", ["run", "runs/run"])
def test_a_run_stands_for_its_checkpoints_and_its_key(checkpoints, tmp_path, monkeypatch, named) -> None:
    """The key of the one who exports is another one."""
    run, key = tmp_path / "runs" / "run", secret.make_checkpoint_key(None)
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("job: {name: run}\n")
    secret.write_private(run / secret.RUN_KEY, key.decode())
    shutil.copytree(checkpoints[0], run / "checkpoints")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(secret.KEY_VARIABLE, "somebody_else")
    assert main(["export", named, "model.safetensors", "--step", "10"]) == 0
    assert load_file("model.safetensors").keys() == model(1).state_dict().keys()
    assert main(["export", "runs/run/checkpoints", "again.safetensors"]) == 64


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["CK"], "OUT"),
        (["NONE", "OUT"], "CHECKPOINT_DIR: got '/"),
        (["NONE", "OUT"], "a folder with a valid checkpoint (it has none)"),
        (["FILE", "OUT"], "a folder that can be read (Not a directory)"),
        (["CK", "OUT", "--step", "7"], "--step: got 7; allowed: 10, 20"),
        (["CK", "OUT", "--step", "x"], "--step"),
        (["CK", "FULL"], "a folder that does not exist yet, or is empty"),
        (["CK", "FILE"], "a folder that does not exist yet, or is empty"),
        (["CK", "FILE/in"], "a folder that can be written ([Errno 20]"),
        (["TORN", "OUT"], "step-10-epoch-1-0-a-0: .metadata has 0 bytes instead of"),
        (["OTHER", "OUT"], "checkpoints of ft_hsdp's own model"),
        (["OTHER", "OUT"], "or OUT as FILE.safetensors"),
        (["ONE", "OUT.safetensors", "--step", "1"], "--step: got 1; allowed: nothing beside one checkpoint"),
        (["OTHER", "LACKS"], "a file that does not exist yet"),
        (["CK", "OUT", "--base", "BASE"], "OUT as FILE.safetensors: the built-in model has no frozen weights"),
        (["OTHER", "OUT.safetensors", "--base", "NONE"], "a safetensors file, or a folder of them"),
        (["OTHER", "OUT.safetensors", "--base", "JUNK"], "a safetensors file, or a folder of them"),
        (["OTHER", "OUT.safetensors", "--base", "LACKS"], "(scale is not in it)"),
        (["OTHER", "OUT.safetensors", "--base", "STRANGE"], "the weights of the job"),
        (["OTHER", "OUT.safetensors", "--base", "EMPTY"], "(body.bias and 2 more are not in it)"),
    ],
)
def test_bad_input_gets_one_line(checkpoints, tmp_path, capsys, argv, said) -> None:
    made = {n: t.clone() for n, t in other().state_dict().items()}
    save_file({n: t for n, t in made.items() if n != "scale"}, tmp_path / "lacks.safetensors")
    save_file({**made, "scale": torch.zeros(2)}, tmp_path / "strange.safetensors")
    (tmp_path / "junk.safetensors").write_bytes(b"x" * 99)
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    torn = shutil.copytree(checkpoints[0], tmp_path / "torn")
    for path in torn.iterdir():
        (path / ".metadata").write_bytes(b"")
    (one,) = (checkpoints[0].parent / "other").iterdir()
    places = {
        "ONE": one,
        "CK": checkpoints[0],
        "OTHER": one.parent,
        "BASE": base_of(other(), tmp_path / "base.safetensors"),
        "FILE": tmp_path / "full" / "file",
        "FILE/in": tmp_path / "full" / "file" / "in",
        "OUT.safetensors": tmp_path / "out.safetensors",
        **{n: tmp_path / f"{n.lower()}.safetensors" for n in ("JUNK", "LACKS", "STRANGE")},
        **{n: tmp_path / n.lower() for n in ("NONE", "EMPTY", "FULL", "OUT", "TORN")},
    }
    assert main(["export", *(str(places.get(word, word)) for word in argv)]) == 64
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert said in err
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("out")]

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from ft_hsdp.errors import ConfigError
from ft_hsdp.train.fsdp.adopted_model import AdoptedModel
from ft_hsdp.train.fsdp.param_groups import ParamGroup
from tests.support.refused import refused

with_zeros = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="FSDP2 of torch 2.11 has no such zeros"
)


class Choosing(nn.Module):
    """Two layers, of which each batch uses one or both."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, x: Tensor, *chosen: int) -> Tensor:
        return torch.stack([self.layers[i](x).square().sum() for i in chosen]).sum()


def adopted(mesh: DeviceMesh, parts: bool, find_unused: bool) -> tuple[AdoptedModel, Choosing, dict[int, Tensor]]:
    torch.manual_seed(0)
    model, seen = Choosing(), dict[int, Tensor]()
    for layer in model.layers if parts else ():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return AdoptedModel(model, 1, seen.__setitem__, find_unused), model, seen


def train(owner: AdoptedModel, model: Choosing, *batches: tuple[int, ...]) -> None:
    for number, chosen in enumerate(batches, 1):
        owner.sync(number == len(batches))
        model(torch.ones(1, 3), *chosen).backward()
    owner.finish()


@with_zeros
@pytest.mark.parametrize("parts", [True, False], ids=["a group each", "one group"])
def test_a_batch_that_leaves_parameters_unused_is_refused_by_name(mesh: DeviceMesh, parts: bool) -> None:
    owner, model, _ = adopted(mesh, parts, find_unused=False)
    train(owner, model, (0, 1))
    owner.clear()
    refused(lambda: train(owner, model, (0,)), r"no gradient of layers.1.\w+ and 1 more.*find_unused")
    owner.clear()
    train(owner, model, (0, 1), (0, 1))
    owner.clear()
    # Though the step uses all of them.
    refused(lambda: train(owner, model, (1,), (0,)), r"no gradient of layers.0")


@with_zeros
@pytest.mark.parametrize("parts", [True, False], ids=["a group each", "one group"])
def test_a_parameter_that_nobody_used_gets_no_gradient(mesh: DeviceMesh, parts: bool) -> None:
    owner, model, seen = adopted(mesh, parts, find_unused=True)
    assert len(owner.sizes) == owner.gradients + 1
    for chosen in ((0,), (1,), (0, 1)):
        train(owner, model, chosen)
        sums = [seen[bucket].clone() for bucket in range(len(owner.sizes))]
        owner.clear()
        owner.assign(sums)
        given = {int(name.split(".")[1]) for name, p in owner.params.items() if p.grad is not None}
        assert given == set(chosen)
        owner.clear()


def test_a_torch_without_zeros_for_unused_parameters_is_named(mesh, monkeypatch) -> None:
    monkeypatch.setattr(ParamGroup, "reduces_unused", False)
    owner, model, _ = adopted(mesh, parts=False, find_unused=False)
    train(owner, model, (0, 1))
    owner.clear()
    refused(lambda: train(owner, model, (0,)), r"backward: got .no gradient of some.*torch 2\.\d+")
    with pytest.raises(ConfigError, match=r"find_unused_parameters\): got True; .*2\.12 has it"):
        adopted(mesh, parts=True, find_unused=True)


@with_zeros
def test_what_one_contributor_used_is_updated(mesh: DeviceMesh) -> None:
    """The numbers of ranks that used a parameter are summed with the gradients."""
    owner, model, seen = adopted(mesh, True, find_unused=True)
    train(owner, model, (0,))
    mine = [seen[bucket].clone() for bucket in range(len(owner.sizes))]
    owner.clear()
    train(owner, model, (1,))
    theirs = [seen[bucket].clone() for bucket in range(len(owner.sizes))]
    owner.clear()
    owner.assign([a + b for a, b in zip(mine, theirs, strict=True)])
    assert all(p.grad is not None for p in owner.params.values())

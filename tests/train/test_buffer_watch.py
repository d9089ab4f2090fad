"""What finds that training changes a tensor that no state has."""

import pytest
import torch
from torch import nn

from ft_hsdp.errors import ConfigError
from ft_hsdp.train.fsdp import frozen
from ft_hsdp.train.fsdp.frozen import BLOCK, BufferWatch, ways
from ft_hsdp.train.fsdp.moving_buffers import places


class Model(nn.Module):
    """A buffer of three blocks, an empty place, a cache, and a frozen parameter of two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("code", torch.zeros(3 * BLOCK // 4))
        self.register_buffer("later", None)
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.frozen = nn.Parameter(torch.zeros(2 * BLOCK // 4), requires_grad=False)
        self.code: torch.Tensor


def watched() -> tuple[Model, BufferWatch]:
    model = Model()
    watch = BufferWatch(list(places(model).values()))
    watch.begin()
    assert watch.look() == []
    return model, watch


def named(found: list[frozen.Place]) -> list[str]:
    return [place.name for place in found]


def through_data(model: Model) -> None:
    model.code.data[-1] = 1


def detached(model: Model) -> None:
    model.code.detach().numpy()[BLOCK // 4] = 1


def another_tensor(model: Model) -> None:
    model.code = model.code + torch.eye(1, len(model.code))[0]


def another_form(model: Model) -> None:
    model.code = model.code.view(3, -1)


@pytest.mark.parametrize("change", [through_data, detached, another_tensor, another_form])
def test_any_write_into_a_buffer_is_found_once(change: object) -> None:
    model, watch = watched()
    change(model)  # type: ignore[operator]
    (found,) = watch.look()
    assert (found.name, watch.look()) == ("code", [])
    with pytest.raises(
        ConfigError, match=r"'code, which training changes'; allowed: .*\{\"code\": MODE\}"
    ) as refused:
        watch.refuse([found])
    assert refused.value.exit_code == 64


@pytest.mark.parametrize(("name", "modes"), [("code", '"state" or "mean"'), ("count", '"state"')])
def test_only_modes_that_a_tensor_may_have_are_offered(name: str, modes: str) -> None:
    model = Model()
    model.register_buffer("count", torch.tensor(0))
    assert f"with {modes} (the state has it)" in ways(places(model)[name])


def test_a_buffer_that_forward_makes_is_found() -> None:
    model, watch = watched()
    model.later = torch.zeros(3)
    assert named(watch.look()) == ["later"]


def test_a_buffer_that_is_not_persistent_is_found_and_never_refused() -> None:
    model, watch = watched()
    model.cache.add_(1)  # type: ignore[operator]
    (found,) = watch.look()
    watch.refuse([found])
    assert found.kind == "scratch"


def test_a_look_at_all_sees_the_first_block_of_a_frozen_parameter_and_later_ones_its_others() -> None:
    model, watch = watched()
    for _ in range(4):
        assert watch.look_on() == []
    model.frozen.data[0] = 1
    assert named(watch.look()) == ["frozen"]
    watch.begin()
    for _ in range(4):
        watch.look_on()
    model.frozen.data[-1] = 1
    assert watch.look() == []
    assert [name for _ in range(4) for name in named(watch.look_on())] == ["frozen"]


def test_what_is_loaded_before_it_begins_counts_as_right() -> None:
    model, watch = watched()
    model.code.add_(1)
    watch.begin()
    assert watch.look() == []

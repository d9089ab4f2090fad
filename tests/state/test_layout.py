import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ft_hsdp.state.transfer import parts, shard_manifest
from ft_hsdp.state.transfer.shard_manifest import ALIGN, Layout
from ft_hsdp.train.optimizer.groups import tensors as state_of
from ft_hsdp.train.state import packing
from tests.support.forked import of_ranks
from tests.support.state.state_helpers import chunks_of, tensors


def test_what_is_packed_comes_out() -> None:
    params, optim = tensors(1), {f"{n}.exp_avg": t for n, t in tensors(2).items()}
    source = [*params.values(), *optim.values()]
    place = Layout.of(params, optim)
    buffer = torch.full((place.nbytes,), 0xFF, dtype=torch.uint8)
    packing.pack(place, source, buffer)
    target = [torch.zeros_like(t) for t in source]
    packing.unpack(place, buffer, target)
    assert all(torch.equal(a, b) for a, b in zip(source, target, strict=True))
    used = torch.zeros(place.nbytes, dtype=torch.bool)
    for t in place.tensors:
        assert t.offset % ALIGN == 0
        assert not used[t.offset : t.offset + t.nbytes].any(), "two tensors overlap"
        used[t.offset : t.offset + t.nbytes] = True
    assert not buffer[~used].any(), "the padding is not zero, so equal states could differ"


@pytest.mark.parametrize("chunk", [64, 1000, 4 << 20])
def test_its_checksums_are_of_the_sources_chunk_by_chunk(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks_of(monkeypatch, chunk)
    monkeypatch.setattr(packing, "PIECE", 300)
    source = tensors(3)
    place = Layout.of(source, {})
    buffer = torch.full((place.nbytes,), 0xFF, dtype=torch.uint8)
    sums = packing.pack(place, list(source.values()), buffer)
    assert sums == shard_manifest.checksums(memoryview(buffer.numpy()))  # type: ignore[arg-type]


def through(source: list[torch.Tensor]) -> list[torch.Tensor]:
    place = Layout.of({str(i): each for i, each in enumerate(source)}, {})
    buffer = torch.empty(place.nbytes, dtype=torch.uint8)
    packing.pack(place, source, buffer)
    target = [torch.full(each.shape, 9.0) for each in source]
    packing.unpack(place, buffer, target)
    return target


@given(st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=6), st.integers(0, 99))
def test_any_shapes_also_transposed(shapes: list[list[int]], seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    source = [torch.randn(shape, generator=g) for shape in shapes]
    source += [each.transpose(0, -1) for each in source if each.dim()]
    assert all(torch.equal(a, b) for a, b in zip(source, through(source), strict=True))


def test_values_that_are_no_numbers_survive_bit_by_bit() -> None:
    source = torch.tensor([0x7FC00001, -0x80000000, 0x7F800000, 1], dtype=torch.int32)
    (target,) = through([source.view(torch.float32)])
    assert torch.equal(target.view(torch.int32), source)


@pytest.mark.parametrize(
    "other",
    [
        {"b": torch.zeros(4)},
        {"a": torch.zeros(5)},
        {"a": torch.zeros(2, 2)},
        {"a": torch.zeros(4, dtype=torch.int32)},
        {"a": torch.zeros(4), "b": torch.zeros(0)},
    ],
)
def test_the_fingerprint_tells_layouts_apart(other: dict[str, torch.Tensor]) -> None:
    mine = Layout.of({"a": torch.zeros(4)}, {})
    assert mine.fingerprint == Layout.of({"a": torch.ones(4)}, {}).fingerprint
    assert mine.fingerprint != Layout.of(other, {}).fingerprint
    assert mine.fingerprint != Layout.of({}, {"a": torch.zeros(4)}).fingerprint


def test_another_number_of_tensors_is_a_programmers_error() -> None:
    place = Layout.of({"a": torch.zeros(4)}, {})
    with pytest.raises(ValueError, match="shorter"):
        packing.pack(place, [], torch.empty(place.nbytes, dtype=torch.uint8))


@given(st.lists(st.integers(0, 400), max_size=9), st.integers(1, 20))
def test_consecutive_ranges_hold_every_byte_once(sizes: list[int], parts: int) -> None:
    place = Layout.of({str(i): torch.zeros(n) for i, n in enumerate(sizes)}, {})
    seen = [torch.zeros(t.nbytes, dtype=torch.int8) for t in place.tensors]
    for part in range(parts):
        for tensor, start, stop in packing.within(
            place, place.nbytes * part // parts, place.nbytes * (part + 1) // parts
        ):
            seen[tensor][start:stop] += 1
    assert all((s == 1).all() for s in seen)


class Tied(nn.Module):
    """Shapes that no width divides, with a tied weight and a bias of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(101, 7)
        self.layers = nn.ModuleList([nn.Linear(7, 10), nn.Linear(10, 7)])
        self.head = nn.Linear(7, 101, bias=False)
        self.head.weight = self.embed.weight
        self.last = nn.Linear(101, 1)


def real_layout(width: int, rank: int, columns: bool = False) -> Layout:
    """The layout of a rank; with ``columns`` one layer is cut in its second dimension."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=width)
    try:
        model, mesh = Tied(), init_device_mesh("cpu", (width,))
        fully_shard(model.layers[0], mesh=mesh)
        by_columns = (lambda p: Shard(p.ndim - 1)) if columns else None
        fully_shard(model.layers[1], mesh=mesh, shard_placement_fn=by_columns)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        optimizer.step()
        names = {id(param): name for name, param in model.named_parameters()}
        return Layout.of(dict(model.named_parameters()), state_of(optimizer, names))
    finally:
        dist.destroy_process_group()


def check_widths() -> None:
    dist.destroy_process_group()
    found = {(width, rank): real_layout(width, rank) for width in (1, 3, 4) for rank in range(width)}
    for (width, rank), place in found.items():
        parts.check(place.tensors, width, rank)
        for (other, its), wanted in found.items():
            assert parts.layout_at(place.tensors, other, its) == wanted, (width, rank, other, its)
    assert {(t.name.endswith(".step"), t.cut) for t in found[4, 3].tensors} == {(True, "whole"), (False, "rows")}
    with pytest.raises(parts.Uncuttable, match="is not cut by rows"):
        parts.check(real_layout(2, 1, columns=True).tensors, 2, 1)


@pytest.mark.multiproc
def test_the_layouts_of_other_widths_are_those_that_fsdp2_makes() -> None:
    """In a process of its own: torch's process group is one for a whole process."""
    assert of_ranks(1, check_widths) == [None]

import pytest
import torch

from ft_hsdp.state.transfer import shard_manifest
from ft_hsdp.state.transfer.shard_manifest import Layout, checksums
from ft_hsdp.train.state import packing
from ft_hsdp.train.state.packing import pack, pack_staged, unpack


@pytest.mark.parametrize("stage", [64, 1 << 10, 1 << 16])
def test_what_a_device_writes_into_stages_is_packed_like_what_lies_in_host_memory(monkeypatch, stage: int) -> None:
    """Stages end within tensors and within the gaps between them, and are used again while others land."""
    monkeypatch.setattr(packing, "STAGE", stage)
    for module in (packing, shard_manifest):
        monkeypatch.setattr(module, "CHUNK_BYTES", 64)
    drawn = torch.Generator().manual_seed(0)
    tensors = {f"{n}": torch.randn(n, 3, generator=drawn) for n in (1, 7, 300, 0, 41)}
    tensors |= {"half": torch.ones(5).half(), "turned": torch.randn(9, 4, generator=drawn).t()}
    layout = Layout.of(tensors, {"flag": torch.tensor([True, False, True])})
    sources = [*tensors.values(), torch.tensor([True, False, True])]
    wanted, found = (torch.full((layout.nbytes,), 255, dtype=torch.uint8) for _ in range(2))
    assert pack_staged(layout, sources, found) == pack(layout, sources, wanted)
    assert torch.equal(found, wanted)
    assert pack(layout, sources, wanted) == checksums(memoryview(found.numpy().tobytes()))
    again = [torch.zeros_like(source) for source in sources]
    unpack(layout, found, again)
    assert all(torch.equal(a, b) for a, b in zip(again, sources, strict=True))


def test_an_error_while_a_stage_lands_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "STAGE", 64)
    monkeypatch.setattr(packing, "_copy", lambda *_: 1 / 0)
    layout = Layout.of({"x": torch.ones(1000)}, {})
    with pytest.raises(ZeroDivisionError):
        pack_staged(layout, [torch.ones(1000)], torch.empty(layout.nbytes, dtype=torch.uint8))

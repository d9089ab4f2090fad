import torch

from ft_hsdp.train.live_state import Offload


def test_between_updates_the_bytes_are_in_host_memory_only() -> None:
    tensors = [torch.randn(5, 3), torch.arange(7.0), torch.tensor(2.0), torch.empty(0)]
    before = [t.clone() for t in tensors]
    offload = Offload(tensors)
    assert all(t.untyped_storage().nbytes() == 0 for t in tensors)
    assert all(torch.equal(h, b) for h, b in zip(offload.host, before, strict=True))
    offload.visit()
    assert all(torch.equal(t, b) for t, b in zip(tensors, before, strict=True))
    for t in tensors:
        t.add_(1)
    offload.leave()
    assert all(torch.equal(h, b + 1) for h, b in zip(offload.host, before, strict=True))
    assert offload.moved.nbytes == 3 * 4 * (15 + 7 + 1)
    assert offload.lap() == offload.moved.seconds > 0
    assert offload.lap() == 0

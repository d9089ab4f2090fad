import torch

from ft_hsdp.train.device import stream


def test_each_use_and_place_has_a_stream_of_its_own() -> None:
    seeds = {stream(s, use, *at) for s in (0, 1) for use in ("init", "batch") for at in ((0, 1), (1, 0), ("0/1",))}
    assert len(seeds) == 2 * 2 * 2, 'only (0, 1) and ("0/1",) are one place'
    assert stream(0, "batch", 3, 1) == stream(0, "batch", 3, 1)
    assert all(0 <= seed < 2**63 for seed in seeds)
    torch.manual_seed(max(seeds))

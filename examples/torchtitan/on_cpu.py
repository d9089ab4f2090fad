"""torchtitan.train on CPUs: ``python examples/torchtitan/on_cpu.py`` in place of ``python -m torchtitan.train``.

torchtitan 0.3 is for GPUs. What it asks of them is answered here, before it is imported. FlexAttention has no
backward on CPUs, so `attend` takes its place: torch's own scaled dot product attention, with the same mask.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, block_mask: BlockMask, scale: float | None, enable_gqa: bool, **_: Any
) -> tuple[Tensor, None]:
    """Compute what FlexAttention computes with a mask alone, and nothing about it.

    Args:
        q: Queries [batch, heads, length, width]; so are keys and values.
        k: Keys.
        v: Values.
        block_mask: Of batch and positions, and the same for all heads.
        scale: Of the scores; None is 1 / sqrt(width).
        enable_gqa: Whether keys and values may have fewer heads.
        _: Other settings of torchtitan, which are for kernels.
    """
    mask = create_mask(block_mask.mask_mod, q.shape[0], None, q.shape[2], k.shape[2], device=str(q.device))
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
    return out, None


def sum_gradients(model: nn.Module) -> None:
    """Have FSDP2 add gradients up, as torchtitan does, in the way that gloo can."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def answer_for_a_gpu() -> None:
    """Import torchtitan for CPUs, and replace what needs a GPU."""
    torch._utils._get_available_device_type = lambda: "cpu"

    from torchtitan.components import metrics
    from torchtitan.distributed import fsdp
    from torchtitan.distributed import utils as dist_utils
    from torchtitan.models.common import attention
    from torchtitan.tools import utils

    peak = metrics.DeviceMemStats(0.0, 0.0, 0.0, 0.0, 0, 0)
    monitor = SimpleNamespace(device_name="cpu", get_peak_stats=lambda: peak, reset_peak_stats=lambda: None)
    metrics.build_device_memory_monitor = lambda: monitor
    utils.get_peak_flops = lambda device_name: 1e12
    attention.FlexAttention.compiled_flex_attn = staticmethod(attend)
    attention._compiled_create_block_mask = create_block_mask
    fsdp.disable_fsdp_gradient_division = sum_gradients
    dist_utils.set_pg_timeouts = lambda timeout, parallel_dims: dist.barrier()


answer_for_a_gpu()

if __name__ == "__main__":
    from torchtitan.train import main

    main()

"""Triton kernels of FTAR's data plane on GPUs. The CPU path does not need them."""

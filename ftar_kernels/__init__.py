"""Triton kernels of FTAR's data plane on GPUs (FT-HSDP §4.2). Imports torch and triton only; the CPU path needs
neither this package nor triton."""

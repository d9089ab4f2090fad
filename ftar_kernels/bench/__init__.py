"""The bench of the kernels: `python -m ftar_kernels.bench`. It checks first and measures afterwards."""

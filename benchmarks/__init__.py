"""Measurements that stand beside the product: a checkout has them, a wheel does not.

`launcher.py bench NAME` runs the five benches of the product (`ft_hsdp.bench`) and, in a checkout, those of this
folder. Nothing in the product imports this package. What a bench finds stands in docs/measurements.md.

- `kernels`: the kernels and the GPU data plane; `python -m benchmarks.kernels`, or `make gpu`, runs them.
"""

"""Measurements that stand beside the product: a checkout has them, a wheel does not.

In a checkout `launcher.py bench NAME` runs these, too (`ft_hsdp.bench.command` has the table). Each module has
`options`, from the words of a command line, `goals` and `run`, as a bench of `ft_hsdp.bench`, of whose parts it is
made. Nothing in the product imports this package. What a bench finds stands in docs/measurements.md.

- `returns` (bench return): a killed replica's way back;
- `token_mean`: the gradient of a job that weighs tokens beside that of one big batch;
- `memory`: copies of states in host memory;
- `whole_job`: a job whose end is awaited;
- `kernels`: the kernels and the GPU data plane; `python -m benchmarks.kernels`, or `make gpu`, runs them.
"""

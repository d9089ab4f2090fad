"""Measurements that stand beside the product: a checkout has them, a wheel does not.

In a checkout `launcher.py bench NAME` runs these, too (`ft_hsdp.bench.command` has the table). Each module has
`options`, from the words of a command line, `goals` and `run`, as a bench of `ft_hsdp.bench`, of whose parts it is
made. Nothing in the product imports this package. What a bench finds stands in docs/measurements.md.

- `returns` (bench return): a killed replica's way back;
- `units` with `unit_figures` and `token_mean`: work that is counted in units, while replicas are lost;
- `memory`: copies of states in host memory;
- `lone`, `losses`: a replica that goes on with fewer ranks, once and at random;
- `whole_job`: a job whose end several of these await;
- `kernels`: the kernels and the GPU data plane; `python -m benchmarks.kernels`, or `make gpu`, runs them.
"""

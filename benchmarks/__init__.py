"""Measurements that stand beside the product: a checkout has them, a wheel does not.

In a checkout `launcher.py bench NAME` runs these, too (`ft_hsdp.bench.command` has the table). Each module has
`options`, from the words of a command line, `goals` and `run`, as a bench of `ft_hsdp.bench`, of whose parts it is
made. Nothing in the product imports this package. What a bench finds stands in docs/measurements.md.

- `rings`, `link`: the all-reduce when a member dies; on slow links, with `namespaces`;
- `returns` (bench return), `local`, `readers`: a killed replica's way back, its state from the memory of its host,
  and readers of state that are slow or malicious;
- `under_ray` (bench ray): a step under Ray; `snapshots` (bench snapshot): with a snapshot of each state;
- `units` with `unit_figures` and `token_mean`: work that is counted in units, while replicas are lost;
- `memory`, `flips`: copies of states in host memory, and bytes that flip in them;
- `lone`, `losses`: a replica that goes on with fewer ranks, once and at random;
- `adopt`: models and trainers of others;
- `whole_job`: a job whose end several of these await;
- `kernels`: the kernels and the GPU data plane; `python -m benchmarks.kernels`, or `make gpu`, runs them.
"""

"""The benches: `launcher.py bench NAME` measures one part of the product beside others that do the same.

A checkout has them, a wheel does not: nothing in the product imports this package, and `ft_hsdp.launch.cli` finds
`command` by its name. Every figure is taken beside its contenders in one run, in turns (ABAB), because a figure
alone depends on the machine and on what else runs there. A bench prints its figures and goals, and returns a
result that is ready for JSON. What the benches found stands in docs/measurements.md.

Read in this order:

- `command`: the benches by name, and what the user asks of each;
- `results`: figures, how they stand to the goals, the machine, output;
- `processes`: how a bench starts its processes, tells them what to do, and ends them;
- `allreduce` (bench ftar) with its `allreduce_ranks`, `quorum`, `state_fetch` (bench fetch), `recovery` with its
  `jobs`, `overhead`, `returns` (bench return: a killed replica's way back), `hosts`, `memory` (copies of states
  in host memory) with `whole_job`, a job whose end is awaited, and `culprits`: each has `options`, from the words
  of a command line, `goals` and `run`;
- `training`: the models and the training loops of the ranks; `torchft`: everything that imports torchft.

Two have no name there: `token_mean`, the gradient of a job that weighs tokens beside that of one big batch, and
`kernels`, the kernels and the GPU data plane (`python -m benchmarks.kernels`, or `make gpu`).

A bench's own process imports no torch: threads of one contender must not disturb another one.

Example:
    from benchmarks.recovery import RecoveryOptions, run
    from benchmarks.results import show
    show(run(RecoveryOptions(("kill",), kills=20), sys.stderr), sys.stdout)
"""

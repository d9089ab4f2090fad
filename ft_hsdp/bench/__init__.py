"""The benches: `launcher.py bench NAME` measures one part of the product beside others that do the same.

Every figure is taken beside its contenders in one run, in turns (ABAB), because a figure alone depends on the
machine and on what else runs there. A bench prints its figures and goals, and returns a result that is ready for
JSON.

Read in this order:

- `command`: the benches by name, and what the user asks of each;
- `results`: figures, how they stand to the goals, the machine, output;
- `processes`: how a bench starts its processes, tells them what to do, and ends them;
- `allreduce` (bench ftar) with its `allreduce_ranks`, `quorum`, `state_fetch` (bench fetch), `recovery` with its
  `jobs`, `overhead`: each has `options`, from the words of a command line, `goals` and `run`;
- `training`: the models and the training loops of the ranks; `torchft`: everything that imports torchft.

The bench's own process imports no torch: threads of one contender must not disturb another one. Benches that back
other figures stand in `benchmarks/` of the repository, and are built of these modules. No part of the product
imports this package except `ft_hsdp.launch.cli`, which runs it.

Example:
    from ft_hsdp.bench.recovery import RecoveryOptions, run
    from ft_hsdp.bench.results import show
    show(run(RecoveryOptions(("kill",), kills=20), sys.stderr), sys.stdout)
"""

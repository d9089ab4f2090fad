"""The benches: `launcher.py bench NAME` measures one part of the product beside others that do the same.

Every figure is taken beside its contenders in one run, in turns (ABAB), because a figure alone depends on the
machine and on what else runs there. A bench prints tables and the goals, and returns a result that is ready for
JSON.

Read in this order:

- `command`, `options`: the benches by name, and what the user asks of each;
- `results`, `goals`, `tables`: figures and the machine, how they stand to the goals, output;
- `scope`: how a bench starts its processes, waits for them, and ends them;
- `workers`, `contenders`: processes that do one thing on command, and what each of them measures;
- one module or package for each bench: `allreduce` (bench ftar), `quorum`, `state_fetch` (bench fetch),
  `recovery`, `overhead` with `hsdp`; each has `options`, from the words of a command line, and `run`;
- `trainee`: the models that recovery and overhead train.

Benches that back other figures stand in `benchmarks/` of the repository, and are built of these modules.

Only `contenders` may import torchft (an import contract holds this), and no part of the product imports this
package except `ft_hsdp.launch.cli`, which runs it.

Example:
    from ft_hsdp.bench.recovery.bench import RecoveryOptions, run
    from ft_hsdp.bench.tables import show
    show(run(RecoveryOptions(("kill",), kills=20), sys.stderr), sys.stdout)
"""

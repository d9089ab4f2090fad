"""The benches: `launcher.py bench NAME` measures one part of the product beside others that do the same.

Every figure is taken beside its contenders in one run, in turns (ABAB), because a figure alone depends on the
machine and on what else runs there. A bench prints tables and the goals, and returns a result that is ready for
JSON.

Read in this order:

- `command`: the benches by name, and what the user asks of each;
- `results`, `goals`, `tables`, `table_parts`: figures and the machine, how they stand to the goals, output;
- `scope`: how a bench starts its processes, waits for them, and ends them;
- `workers`, `contenders`: processes that do one thing on command, and what each of them measures;
- one module or package for each bench: `allreduce` (bench ftar), `quorum`, `state_fetch` (bench fetch),
  `recovery`, `overhead` with `hsdp`, `adopt`, `units`, `strangers`, `tls`, `driver`;
- `trainee`: the models that recovery, overhead and adopt train.

Only `contenders` may import torchft (an import contract holds this), and no part of the product imports this
package except `ft_hsdp.launch.cli`, which runs it.

Example:
    from ft_hsdp.bench.command import RecoveryOptions
    from ft_hsdp.bench.recovery.bench import run
    from ft_hsdp.bench.tables import show
    show("recovery", run(RecoveryOptions(("kill",), kills=20, rounds=5, sizes=()), sys.stderr), sys.stdout)
"""

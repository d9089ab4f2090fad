"""`bench units`: whether a step has its units while replicas are away, what that costs, and what it is worth.

Real jobs train, replicas get SIGKILL, and the figures are read off their logs afterwards. Jobs whose time is
measured wait instead of computing: with more processes than cores, a step would be faster for each one that is
dead. Jobs that are measured by their loss, or replayed, are of the built-in trainer.

A figure that must hold in each step (the number of units, units trained twice) is counted over all steps of a run;
a figure of time is a median, beside what it is compared with.

Jobs under test, kills and waits are those of `ft_hsdp.bench.recovery`.

Read in this order:

- `bench`: the measures, one function for each, and what they train;
- `analysis`: from rows of commits to figures (pure);
- `ft_hsdp.bench.token_mean`: gradients with `data.weight: tokens` beside one big batch in fp64.

The call path: `bench units` -> `bench` -> `recovery.job_under_test` -> the logs of the run -> `analysis`.
"""

"""`bench recovery`: what a lost replica costs the others, and how soon it is back.

Real jobs train, ranks get SIGKILL or SIGSTOP at random moments, and the figures are read off the logs afterwards:
failures and starts by `ft_hsdp.analysis`, as for summary.json, and what each survivor waited for by `analysis`.

Read in this order:

- `bench`: which measures run; what a kill costs the survivors, and when the victim is back;
- `setup`, `job`: what is trained, and the process that runs the job (the ranks run `ft_hsdp.bench.trainee`);
- `job_under_test`, `torchft_under_test`: a running job of each contender, and how its ranks are hit at random;
- `analysis`: from logs to stalls and returns (pure).

`setup` and this package import neither torch nor anything else that takes time to import.

The call path: `bench recovery` -> `bench` -> `job_under_test` -> the logs of the run -> `analysis`.
"""

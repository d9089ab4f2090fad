"""`bench recovery`: what a lost replica costs the others.

Real jobs train, ranks get SIGKILL or SIGSTOP at random moments, and the figures are read off the logs afterwards.

Read in this order:

- `bench`: which measures run, and what a kill costs the survivors;
- `setup`, `job`: what is trained, and the process that runs the job (the ranks run `ft_hsdp.bench.trainee`);
- `job_under_test`, `torchft_under_test`: a running job of each contender, and how its ranks are hit at random;
- `analysis`: from logs to stalls (pure).

`setup` and this package import neither torch nor anything else that takes time to import.

Example:
    launcher.py bench recovery --measure kill --kills 3 --json

The call path: `bench recovery` -> `bench` -> `job_under_test` -> the logs of the run -> `analysis`.
"""

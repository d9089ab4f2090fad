"""Worker processes of the benches: each carries out commands that the bench sends over a socket, in JSON lines.

Read the modules in this order:

    link    both ends of a worker's socket: `WorkerLink` in the bench, `run_worker` in the worker
    worker  a member of an all-reduce, and the process from which members are forked
    rings   the workers of all contenders of `bench ftar`, forked

A worker is set up before its bench measures, and waits for commands in a socket, so it uses no processor while
another contender is measured. Members are forked from one process that has imported torch, which takes seconds.
If a worker fails it answers with the error and ends; if the bench dies its workers die with it.

Of the contenders this package imports `base` only: a worker loads the one that its spec names.

The call path: `bench ftar` -> `rings` -> `WorkerLink` -> `worker` -> a contender of `ft_hsdp.bench.contenders`.
"""

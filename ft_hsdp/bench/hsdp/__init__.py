"""What the exchange between replicas costs a training step, on a link like that between machines.

Three contenders train the same model in turn: replicas that exchange nothing, PyTorch's own HSDP, and ft_hsdp. The
first one is the baseline; what the others take longer is the cost of their exchange.

Read the modules in this order:

    network    namespaces with slow links between them, instead of machines
    processes  what is trained, and the processes of one contender
    worker     one rank: an ordinary training loop that stops before each step
    measure    from blocks of steps to the cost of the exchange

`measure` runs in the bench's process and imports no torch; the ranks do.

The call path: `bench overhead` -> `measure` -> `processes` -> a `worker` for each rank, on `network`.
"""

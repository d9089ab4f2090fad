"""The contenders of the benches: what is measured side by side, each behind the interface of its bench.

Read the modules in this order:

    base          the all-reduces by name; `AllReduceRank`, what each does in a worker
    allreduce     gloo, and FTAR with each of its transports
    fetch         ways to fetch a state: bare sockets, and ft_hsdp's `state.transfer`
    torchft       torchft's process group, its checkpoint transport and its lighthouse
    torchft_loop  a training loop on torchft's Manager

Of the product only this package and `ft_hsdp.compat` may import torchft. The bench's own process imports `base` at
most: torch and torchft are imported in the worker that measures them, so that the threads of one contender do
not disturb another one.

The call path: `bench ftar` -> `workers.rings` -> a worker -> `AllReduceRank.all_reduce` of one contender.
"""

"""One training loop, with ft_hsdp or with PyTorch's own FSDP2 and HSDP: contenders that train in turn.

All contenders are alive at once, and each trains a block of steps while the others wait, so that what else runs on
the machine slows all of them. Between two blocks each rank stands before its next step.

Read the modules in this order:

- `processes`: what is trained, and the processes of one contender, where a `Loopback` puts them;
- `worker`: one rank, an ordinary training loop that stops before each step.

`processes` is imported by the bench's process and imports no torch; the ranks do.

The call path: `bench overhead` -> `overhead.in_turns` -> `processes.start` -> a `worker` for each rank.

`bench link` of the repository trains with the same processes on slow links.
"""

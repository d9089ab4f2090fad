"""What the exchange between replicas costs a training step, on a link like that between machines.

Three contenders train the same model in turn: replicas that exchange nothing, PyTorch's own HSDP, and ft_hsdp.

- `network`: namespaces with slow links between them, instead of machines;
- `processes`: what is trained, and the processes of one contender;
- `measure`: from blocks of steps to the cost of the exchange;
- `worker`: one rank.
"""

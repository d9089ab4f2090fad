"""What the exchange between replicas costs a training step, on a link like that between machines.

Three contenders train the same model in turn: replicas that exchange nothing, PyTorch's own HSDP, and ft_hsdp.

- `setup`: what is trained, and on which machine;
- `network`: namespaces with slow links between them, instead of machines;
- `processes`: the ranks of one contender, with the lighthouse and the state agents of ft_hsdp;
- `measure`: from blocks of steps to the cost of the exchange;
- `worker`: one rank.
"""

"""What the exchange between replicas costs a training step, on a link like that between machines.

Three crews train the same model in turn: replicas that exchange nothing, PyTorch's own HSDP, and ft_hsdp.
"""

"""Adapters that put parts of this package into other fault-tolerance systems.

A training loop that another system drives keeps that system's control plane, and takes from here only what it
needs. There is one package for each system:

- `torchft`: a process group for torchft's ``Manager`` that sums gradients with FTAR, and a transport for its
  checkpoints.

An adapter translates between the names, errors and conventions of the other system and those of `ft_hsdp.ftar`
and `ft_hsdp.state`, which do the work. It makes no decision of its own: the other system decides who is a
member of a quorum.

Importing an adapter imports its system. Nothing else in the product does, so the rest of `ft_hsdp` runs without
it; `pyproject.toml` enforces that. An adapter does not use
`ft_hsdp.train`, `ft_hsdp.control` or the lighthouse, which the other system replaces.

Example:

    from ft_hsdp.compat.torchft import ProcessGroupFTAR, StateTransport
"""

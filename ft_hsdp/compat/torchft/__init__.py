"""A process group and a checkpoint transport for torchft's ``Manager``, of torchft 0.2 and of its nightly.

Importing this package imports torchft.

`ProcessGroupFTAR` takes the place of torchft's ``ProcessGroupGloo``: sums go through the fault-tolerant
all-reduce (FT-HSDP §4.2), everything else through torch's gloo. `StateTransport` takes the place of
``HTTPTransport``: a replica that is behind fetches a checksummed copy of the state, and nothing is unpickled
(FT-HSDP §4.4). Each can be used without the other.

Read the modules in this order:

- `process_group`: `ProcessGroupFTAR`, and the communicator that it keeps through all quorums.
- `handles`: how c10d and torchft's nightly name the members of a quorum; a store that a group serves.
- `quorum`: how the ranks of one quorum find each other through a store of torch; the ring and the gloo group of
  one quorum, and the error that ends both.
- `work`: what a collective returns: the futures that torch.distributed and torchft expect.
- `transport`: `StateTransport`, and the JSON form of a state dict.

An all-reduce goes this way:

    ProcessGroupFTAR.allreduce -> Quorum.sum -> bundles -> ftar.Communicator.all_reduce -> SumWork

An error of a sum or of gloo ends the quorum on all its ranks: ``errored`` returns it, and every later call
raises it until the next ``configure`` or ``reconfigure``.

Example (docs/torchft.md has a whole one):

    group = ProcessGroupFTAR(timeout=timedelta(seconds=10))
    manager = Manager(pg=group, checkpoint_transport=StateTransport(), ...)
"""

from ft_hsdp.compat.torchft.process_group import ProcessGroupFTAR
from ft_hsdp.compat.torchft.transport import StateTransport

__all__ = ["ProcessGroupFTAR", "StateTransport"]

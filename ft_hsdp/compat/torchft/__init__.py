"""What fits into torchft: a process group for its Manager that sums by FTAR, and a transport for checkpoints.

Importing this imports torchft.
"""

from ft_hsdp.compat.torchft.process_group import ProcessGroupFTAR
from ft_hsdp.compat.torchft.transport import StateTransport

__all__ = ["ProcessGroupFTAR", "StateTransport"]

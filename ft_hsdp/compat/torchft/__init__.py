"""What fits into torchft: a process group for its Manager that sums by FTAR. Importing this imports torchft."""

from ft_hsdp.compat.torchft.process_group import ProcessGroupFTAR

__all__ = ["ProcessGroupFTAR"]

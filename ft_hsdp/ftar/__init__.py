"""FTAR: the fault-tolerant all-reduce between the ranks with one number in all replicas (FT-HSDP §4.2)."""

from ft_hsdp.ftar.communicator import Communicator
from ft_hsdp.ftar.executor import Work
from ft_hsdp.ftar.settings import Settings

__all__ = ["Communicator", "Settings", "Work"]

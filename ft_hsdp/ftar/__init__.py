"""FTAR: the fault-tolerant all-reduce between the ranks with one number in all replicas (FT-HSDP §4.2)."""

from ft_hsdp.ftar.communicator import Communicator
from ft_hsdp.ftar.settings import Settings
from ft_hsdp.ftar.work import Work

__all__ = ["Communicator", "Settings", "Work"]

"""Preflight: what would stop a job, before it is started, and what to do about it (docs/doctor.md).

Nothing is started that lasts, and no file is left.
"""

from ft_hsdp.launch.doctor.checks import CHECKS, examine
from ft_hsdp.launch.doctor.result import Bad, CheckState, Finding, Subject, Undecided

__all__ = ["CHECKS", "Bad", "CheckState", "Finding", "Subject", "Undecided", "examine"]

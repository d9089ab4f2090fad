"""The doctor: what would stop a job, found before it is started, with what to do about it (docs/doctor.md).

Each check looks at one thing and returns findings: good, a warning, or a failure with its remedy. All checks run
at once, each in a thread that may block, within one deadline. Nothing is started that lasts, and no file is left.

Read the modules in this order:

    result    what is examined, what a check finds, and how a module is asked in a process of its own
    checks    all checks within one deadline
    host      processors, open files, threads and memory of this machine
    machine   sizes of the model and of the job; control groups
    network   names, ports, services elsewhere, the clock
    storage   versions; folders, room on disks, checkpoints
    gpu       GPUs, asked in `gpu_probe`, a process of its own
    ray       the Ray cluster, asked in `ray_probe`, a process of its own

The call path: `doctor CONFIG` -> `checks` -> one function of each module -> `Finding`. torch and Ray are imported
in the probes only: a library that hangs or crashes costs its own check.
"""

from ft_hsdp.launch.doctor.checks import CHECKS, examine
from ft_hsdp.launch.doctor.result import Bad, CheckState, Finding, Subject, Undecided

__all__ = ["CHECKS", "Bad", "CheckState", "Finding", "Subject", "Undecided", "examine"]

"""The doctor: finds before the start what would stop a job, and says what to do (docs/doctor.md).

Each check examines one thing and ends as passed, failed with a remedy, or undecided. All checks run at once, each
in a thread that may block, within one deadline. They leave no process and no file.

Read the modules in this order:

    result    what is examined, the result of a check, and how a check runs a probe in a child process
    checks    all checks within one deadline; the user's script or function is compiled and not run
    host      processors, open files, threads, memory and GPUs of this machine; limits of its control groups
    network   names, ports, the lighthouse and etcd on other machines, the clock
    storage   versions, the run's folder, the training data, room on disks, checkpoints
    ray       the Ray cluster, through `probe`

The call path: `doctor CONFIG` -> `examine` -> one function for each check -> `CheckOutcome`. Only `probe` imports
torch and Ray, in a child process, so a library that hangs or crashes affects its own check only.
"""

from ft_hsdp.launch.doctor.checks import CHECKS, examine
from ft_hsdp.launch.doctor.result import Bad, CheckOutcome, CheckState, Subject, Undecided

__all__ = ["CHECKS", "Bad", "CheckOutcome", "CheckState", "Subject", "Undecided", "examine"]

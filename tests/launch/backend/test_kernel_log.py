"""The kernel's log is evidence when a rank ends: which lines count, how long, and what the lighthouse hears."""

from pathlib import Path

import pytest

from ft_hsdp.core.host_report import AssignedRanks
from ft_hsdp.core.restart import Cause, code_of
from ft_hsdp.launch.backend.base import RankProcess
from ft_hsdp.launch.backend.forkserver import ForkServer
from ft_hsdp.launch.backend.rank_end import COUNTS_S, KernelLog, is_evidence
from ft_hsdp.launch.backend.ranks import Forked, HeldRanks
from ft_hsdp.launch.run.directory import RunDir

GONE = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus."


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        (GONE, True),
        ("NVRM: Xid (PCI:0000:3b:00): 48, pid='<unknown>', name=<unknown>, DBE (double bit error)", True),
        ("NVRM: Xid (PCI:0000:3b:00): 31, pid=7, name=python, Ch 00000008, MMU Fault", False),
        ("NVRM: Xid (PCI:0000:3b:00): 94, pid=7, Contained ECC error", False),
        ("NVRM: Xid (PCI:0000:3b:00): 480, pid=7", False),
        ("mce: Uncorrected hardware memory error in user-access at 3f1c7b2400", True),
        ("EDAC MC0: 1 UE memory read error on CPU_SrcID#0_Ha#0_Chan#1_DIMM#0", True),
        ("EDAC MC0: 1 CE memory read error on CPU_SrcID#0_Ha#0_Chan#1_DIMM#0", False),
        ("Memory failure: 0x3f1c7b2: recovery action for dirty LRU page: Recovered", True),
        ("python[7]: segfault at 0 ip 00007f error 4", False),
    ],
)
def test_what_names_broken_hardware_counts_and_nothing_else(line: str, counts: bool) -> None:
    assert is_evidence(line) == counts


def test_a_line_counts_for_a_while_and_those_of_before_do_not(tmp_path: Path) -> None:
    # A line may be as old as the read before it.
    times, file = iter((0.0, 1.0, 2.0, COUNTS_S, 1.0 + COUNTS_S, 2.0 + 2 * COUNTS_S)), tmp_path / "kmsg"
    file.write_text(f"3,1,1,-;{GONE}\n")
    log = KernelLog(file, times.__next__)
    found = []
    for more in ("", f"3,2,2,-;{GONE}\n SUBSYSTEM=pci\n6,3,3,-;eth0: link up\n", "", "", f"3,4,4,-;{GONE}\n"):
        with file.open("a") as kernel:
            kernel.write(more)
        found.append(log.evidence())
    assert found == ["", GONE, GONE, "", ""]
    log.close()
    assert [KernelLog(path).evidence() for path in (tmp_path / "none", tmp_path)] == ["", ""]


@pytest.mark.parametrize(
    ("code", "killed", "said", "cause"),
    [
        (-6, False, GONE, Cause.HARDWARE),
        (75, False, GONE, Cause.HARDWARE),
        (-6, False, "", ""),
        (-9, True, GONE, ""),
        (-9, False, GONE, ""),  # from outside
        (64, False, GONE, ""),  # the configuration
        (0, False, GONE, ""),
    ],
)
def test_a_rank_that_ends_by_itself_beside_such_a_line_has_that_cause(
    code: int, killed: bool, said: str, cause: str, run_dir: RunDir
) -> None:
    held = HeldRanks(
        AssignedRanks("0-a-0", (0,), ("h",), "127.0.0.1:1"), run_dir.config, run_dir, evidence=lambda: said
    )
    process = Forked(7, ForkServer(run_dir.path), "here", "h")
    held.ranks[0] = RankProcess(0, process, killed=killed)
    held.exited(0, process, code)
    (end,) = held.ends
    assert (end.code, end.cause, end.why.startswith(GONE)) == (code, cause, cause != "")


async def test_a_rank_that_does_not_end_when_it_is_killed_counts_as_broken_hardware(run_dir: RunDir) -> None:
    held = HeldRanks(AssignedRanks("0-a-0", (0, 1), ("h", "h"), "127.0.0.1:1"), run_dir.config, run_dir)
    held.starting.clear()
    ranks = {number: Forked(7 + number, ForkServer(run_dir.path), "here", "h") for number in (0, 1)}
    for number, process in ranks.items():
        held.started(number, process)
    held.give_up(0.0)
    assert len(held.living) == 2, "nobody has killed them"
    held.kill()
    held.exited(0, ranks[0], -9)
    held.give_up(60.0)
    assert not held.over
    held.give_up(0.0)
    held.exited(1, ranks[1], -9)  # later, after all
    assert [(end.rank, code_of(end), end.killed) for end in held.ends] == [(0, -9, True), (1, 76, False)]
    await held.gone(0.0)

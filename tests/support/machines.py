"""Machines for tests: what a process sees of its machine is its own, and one machine can be lost.

Each machine has namespaces for network, host name, mounts, processes and System V memory, joined by the switch of
`namespaces`. Its /tmp is a folder of the test, which outlives it; its /dev/shm and /run are empty when
it boots. The rest of the file system, and the kernel with its boot id, is that of the machine below.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from ft_hsdp.launch.backend.processes import environment
from tests.support import namespaces, warm
from tests.support.namespaces import INTERFACE, Network

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
TMP = Path("/tmp")
SPACES = ("--uts", "--ipc", "--mount", "--pid", "--fork")
BOOT = """set -e
echo "$1" > /proc/sys/kernel/hostname; shift
mount -t tmpfs own /dev/shm; mount -t tmpfs own /run
while [ "$2" ]; do mount --rbind "$1" "$2"; shift 2; done
trap '' CHLD; echo booted; exec cat
"""  # it reaps what is left to it, and ends with its standard input: with the test


@cache
def unfit() -> str:
    """Why there can be no machines here, "" if there can."""
    if why := namespaces.unfit():
        return why
    try:
        tried = subprocess.run(["unshare", *SPACES, "--mount-proc", "true"], capture_output=True, text=True)
    except OSError as error:
        return str(error)
    return " ".join(tried.stderr.split()) if tried.returncode else ""


def within(space: str, make: Callable[[], T]) -> T:
    """What ``make`` returns in a thread that is in a network namespace of this name."""

    def moved() -> T:
        with Path("/run/netns", space).open() as file:
            warm.move(file.fileno(), "net")
        return make()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(moved).result()


needs_machines = pytest.mark.skipif(bool(unfit()), reason=unfit() or "there can be machines")


class Machine:
    """One machine of a rig, which runs until it is lost."""

    def __init__(self, rig: "Rig", number: int, folder: Path) -> None:
        self._rig = rig
        self.number = number
        self.name = f"machine{number}"
        self.address = rig.host(number)
        self.tmp = folder / self.name  # its /tmp, as the test sees it
        self._binds = [(folder / "hosts", Path("/etc/hosts"))]
        for outside, at in rig.seen.items():
            mounted = self.tmp / at.relative_to(TMP)
            mounted.mkdir(parents=True, exist_ok=True)  # an environment may be in its checkout
            self._binds.append((outside, mounted))
        self.tmp.mkdir(exist_ok=True)
        self._binds.append((self.tmp, TMP))
        self._started: list[warm.Process] = []
        self._boot()

    def _boot(self) -> None:
        within = self._rig.inside(self.number, "unshare", *SPACES, "--kill-child", "--mount-proc")
        words = [self.name, *(str(path) for bind in self._binds for path in bind)]
        command, log = [*within, "sh", "-c", BOOT, "sh", *words], self.tmp / "boot.log"
        with log.open("ab") as errors:
            ends = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
            self._holder = subprocess.Popen(command, text=True, **ends)
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "booted\n", log.read_text()
        (init,) = psutil.Process(self._holder.pid).children()
        self.init = init.pid

    def start(self, name: str, command: Sequence[str], **variables: str) -> warm.Process:
        """Start a process in its /tmp, which logs to NAME.log there, with ``variables`` in its environment."""
        env = {**environment(), **variables}
        self._started.append(warm.start(command, TMP, self.tmp / f"{name}.log", env, inside=self.init))
        return self._started[-1]

    def run(self, *command: str) -> str:
        """What a command prints here; it must not fail."""
        within = [*warm.enter(self.init), f"--wdns={TMP}", *command]
        return subprocess.run(within, check=True, stdout=subprocess.PIPE, text=True, timeout=30).stdout

    def within(self, make: Callable[[], T]) -> T:
        """What ``make`` returns in the network of this machine, such as a socket of it, for the test's process."""
        return within(self._rig.replicas[self.number], make)

    def cut(self, to: "Machine | None" = None) -> None:
        """Cut its link, or lose only what it sends ``to`` one machine: no end hears of that."""
        if to is None:
            self._rig.cut(self.number)
        else:
            nowhere = ("lladdr", "02:00:00:00:00:00", "nud", "permanent")
            self.run("ip", "neighbour", "replace", to.address, *nowhere, "dev", INTERFACE)

    def heal(self, to: "Machine | None" = None) -> None:
        if to is None:
            self._rig.heal(self.number)
        else:
            self.run("ip", "neighbour", "delete", to.address, "dev", INTERFACE)

    def lose(self, *, cut: bool = True) -> None:
        """End all that runs here; with ``cut`` the others see no connection end."""
        if cut:
            self.cut()
        self.halt()

    def halt(self) -> None:
        """End all processes, unless that is done."""
        with contextlib.suppress(ProcessLookupError):
            if self._holder.poll() is None:
                os.kill(self.init, signal.SIGKILL)
        self._holder.communicate()
        for process in self._started:
            process.wait()

    def boot(self) -> None:
        """Start a lost machine again: with its /tmp, and nothing else of what it had."""
        self.halt()
        self._rig.renew(self.number)
        self._boot()


class Rig(Network):
    """A context with running machines; nothing but their folders is left of them.

    Raises Retryable where a command fails.
    """

    def __init__(self, folder: Path, machines: int, *, v6: bool = False, shared: str = "") -> None:
        """Prepare ``machines`` machines with folders in ``folder``.

        v6: with addresses of IPv6 alone. shared: a folder in /tmp that is one for all.
        """
        super().__init__(machines, v6=v6)
        self._folder = folder
        self.shared = shared
        self.seen = {path: path for path in sorted({ROOT, Path(sys.prefix)}) if TMP in path.parents}
        if shared:
            self.seen[folder / shared] = TMP / shared
            (folder / shared).mkdir()
        self.machines: list[Machine] = []

    def _begin(self, folder: Path) -> None:
        super()._begin(folder)
        numbers = range(len(self.replicas))
        lines = ["127.0.0.1 localhost", "::1 localhost", *(f"{self.host(n)} machine{n}" for n in numbers)]
        (self._folder / "hosts").write_text("\n".join(lines) + "\n")
        for number in numbers:
            machine = Machine(self, number, self._folder)
            self.stack.callback(machine.halt)
            self.machines.append(machine)

    def processes(self) -> Iterator[psutil.Process]:
        """All that runs in the machines now."""
        spaces = {os.readlink(f"/proc/{machine.init}/ns/pid") for machine in self.machines}
        for process in psutil.process_iter():
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{process.pid}/ns/pid") in spaces:
                    yield process

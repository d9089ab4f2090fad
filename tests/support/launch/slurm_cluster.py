"""A Slurm of one or two nodes, for tests: munged, slurmctld and slurmds in a folder and on ports of their own."""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

from tests.support.programs import program
from tests.support.waiting import until

START_S = 30.0
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=bf_interval=1,sched_interval=1
DefMemPerCPU=500
KillWait=10
SlurmdParameters=config_overrides
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
# cred_expire: so long a job that is queued again has to wait, 120 s by default
NODE = """
NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=16 SocketsPerBoard=1 CoresPerSocket=16 \\
ThreadsPerCore=1 RealMemory=16000
"""


class SlurmCluster:
    """A context that leaves no process behind. nodes: 1 or 2, of this machine; both names lead to loopback."""

    def __init__(self, nodes: int = 1) -> None:
        self._host = socket.gethostname().partition(".")[0]
        self._nodes = (self._host, "localhost")[:nodes]
        packages = {"munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd"}
        self._programs = [program(name, package) for name, package in packages.items()]
        program("sbatch", "slurm-client")
        self._folder = Path(tempfile.mkdtemp(prefix="ft_hsdp-slurm-"))
        self._config = self._folder / "slurm.conf"
        self._started: list[subprocess.Popen[bytes]] = []
        self.environment = {**os.environ, "SLURM_CONF": str(self._config)}

    def __enter__(self) -> SlurmCluster:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            if len(self._started) > len(self._nodes) + 1:
                self.run("scancel", "--user", getpass.getuser())
                self.until(lambda: not self.run("squeue", "--noheader"), "the queue is empty")
        for process in reversed(self._started):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        with contextlib.ExitStack() as held:
            taken = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in (0, *self._nodes)]
            ctld, *ports = (sock.getsockname()[1] for sock in taken)
        said = {"host": self._host, "ctld": ctld, "user": getpass.getuser(), "folder": self._folder}
        nodes = [NODE.format(name=n, host=self._host, port=p) for n, p in zip(self._nodes, ports, strict=True)]
        self._config.write_text("".join((*nodes, CONFIG.format(**said))))
        (self._folder / "state").mkdir()
        key = self._folder / "key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        munged, controller, node = self._programs
        files = {"key-file": key, **{f"{n}-file": self._folder / f"munge.{n}" for n in ("log", "pid", "seed")}}
        options = [f"--{name}={file}" for name, file in files.items()]
        self._daemon(munged, "--foreground", "--force", f"--socket={self._folder}/munge.socket", *options)
        self.until(lambda: (self._folder / "munge.socket").exists(), "munged listens")
        self._daemon(controller, "-D", "-f", str(self._config))
        for name in self._nodes:
            (self._folder / f"spool-{name}").mkdir()
            self._daemon(node, "-D", "-f", str(self._config), "-N", name)
        idle = ["idle"] * len(self._nodes)
        look = ("sinfo", "--noheader", "--Node", "--format=%t")
        self.until(lambda: self.run(*look, check=False).split() == idle, "all nodes are idle")

    def _daemon(self, *command: str) -> None:
        with (self._folder / "log").open("ab") as log:
            self._started.append(
                subprocess.Popen(command, stdout=log, stderr=log, env=self.environment, start_new_session=True)
            )

    def run(self, *command: str, check: bool = True) -> str:
        """What one of Slurm's commands prints."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=check, timeout=30
        )
        return done.stdout.strip()

    def until(self, condition, what: str, timeout_s: float = START_S) -> None:
        """Wait for a condition; fail at the deadline, with the queue and the daemons' last words."""
        until(condition, what, timeout_s, self._said)

    def _said(self) -> str:
        log = self._folder / "log"
        queue = self.run("squeue", "--array", check=False) if self._started else ""
        return f"{queue}\n{log.read_text(errors='replace')[-2000:] if log.exists() else ''}"

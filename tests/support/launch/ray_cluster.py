"""A cluster under test, and a job on it: both real, both in processes of their own that leave nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from tests.support.running import running
from tests.support.started_job import MODEL, ROOT, StartedJob, config_of_text, overrides
from tests.support.waiting import until

MARK = "FT_HSDP_TEST_CLUSTER"
SUBMIT = (str(ROOT / "launcher.py"), "submit")
SLOW = (str(Path(__file__).with_name("ray_slow.py")),)
SMALL = {"ranks_per_replica": 1, **MODEL, "quorum.on_lost_head": "rollback", "timeouts.place_s": 2.0}


class Cluster:
    """Nodes of one Ray cluster; a context.

    cpus: of its head, which then has the Jobs API. A job that is uploaded to that wants no other node: all nodes
    here share a folder, in which each unpacks the upload anew, below whoever runs in it already.
    """

    def __init__(self, cpus: int = 0) -> None:
        self.mark = secrets.token_hex(8)
        self.token = secrets.token_hex(32)
        self.folder = Path(tempfile.mkdtemp(prefix="rt"))  # short: sockets are in it
        bin_folder = str(Path(sys.executable).parent)
        self.env = {
            **os.environ,
            MARK: self.mark,
            "HOME": str(self.folder),  # a token that the user has is not this cluster's
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.token,
            "PYTHONPATH": str(ROOT),
            "PATH": os.pathsep.join([bin_folder, os.environ.get("PATH", "")]),
            "RAY_ADDRESS": "",
        }
        words = [str(self.folder / "ray"), *([str(cpus)] if cpus else [])]
        self._log = (self.folder / "nodes.log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("ray_nodes.py")), *words],
            env=self.env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )
        try:
            said = self._answer()
            self.address, self.dashboard = said["address"], said["dashboard"]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, *cpus: float, **labels: str) -> list[int]:
        """Add nodes, one for each number of CPUs; their numbers."""
        wanted = [{"cpus": each, "labels": labels or None} for each in cpus]
        return list(self._order({"add": wanted})["nodes"])

    def remove(self, node: int) -> None:
        self._order({"remove": node})

    def ask(self) -> dict[str, Any]:
        """What lives, as Ray has it: {"nodes": number, "actors": [...], "pids": {pid: node}, "groups": [...]}."""
        return self._order({"ask": True})

    def node_above(self, pid: int) -> int:
        """The number of the node whose actor started a rank."""
        above = {str(process.pid) for process in psutil.Process(pid).parents()}
        (node,) = [node for actor, node in self.ask()["pids"].items() if actor in above]
        return int(node)

    def processes(self) -> dict[psutil.Process, list[str]]:
        """All that were started from here and run, with their command lines."""
        return running(mark=(MARK, self.mark))

    def ours(self) -> list[str]:
        """The commands among them that run a module of ours."""
        names = {"ft_hsdp", "lighthouse"}
        return [
            " ".join(line) for line in self.processes().values() if names & {w.partition(".")[0] for w in line}
        ]

    def emptied(self) -> None:
        """Wait until nothing is left of a job that has ended; Ray may have to find that out by itself."""

        def gone() -> bool:
            known = self.ask()
            return not (known["actors"] or known["groups"] or self.ours())

        until(gone, "all has ended", said=lambda: f"{self.ask()} {self.ours()}")

    def close(self) -> None:
        """End all nodes; whatever is left of them is killed."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        for _ in range(5):  # who is killed may have started another
            left = self.processes()
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(left, 5)
        self._process.wait(5)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _order(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the cluster's nodes ended:\n{(self.folder / 'nodes.log').read_text()[-2000:]}"
        answer: dict[str, Any] = json.loads(line)
        return answer


class Job(StartedJob):
    """A job on a cluster: `launcher.py submit` in a process of its own; a context that ends it."""

    deadline_s = 120.0

    def __init__(
        self, cluster: Cluster, folder: Path, steps: int, *, program: tuple[str, ...] = SUBMIT, **dotted: Any
    ) -> None:
        self.cluster = cluster
        nodes = cluster.folder / "of-ranks"
        settings = {
            **SMALL,
            "job.name": "job",
            "job.runs_dir": str(folder / "runs"),
            "train.steps": steps,
            "ray.folder": str(nodes),
        }
        settings |= {key.replace("__", "."): value for key, value in dotted.items()}
        self.nodes = nodes
        self.words = [config_of_text(folder), "--ray-address", cluster.address, *overrides(settings)]
        command = [sys.executable, *program, *self.words]
        super().__init__(command, folder, folder / "runs" / "job", folder / "submit.log", cluster.env)

    def node_of(self, replica: int) -> int:
        """The number of the node on which a replica's rank 0 is."""
        return self.cluster.node_above(self.ranks(replica)[0]["pid"])

    def spoil(self, host: str) -> None:
        """Let each rank on a host find out that the host is broken, in a job of ray_slow.py."""
        (self.cluster.folder / f"broken-{host}").touch()

    def hurry(self) -> None:
        """Let a job of ray_slow.py go as fast as it can."""
        (self.cluster.folder / "hurry").touch()


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)

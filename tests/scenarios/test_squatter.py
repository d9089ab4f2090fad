"""A lone lighthouse is gone, and a process without the token listens at its port: nobody believes it."""

import json
import os
import signal
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from ft_hsdp.secret import worker_token
from tests.support.launch.squatter import SquatterServer
from tests.support.slow_script import write_slow_script
from tests.support.torchrun_job import TorchrunJob

STEPS = 30
SETTINGS = f"""
replicas: 2
ranks_per_replica: 1
entry: FOLDER/slow.py
train: {{steps: {STEPS}}}
network: {{port: 0}}
quorum: {{lease_s: 600}}
"""


@pytest.mark.soak
def test_replicas_go_on_beside_a_squatter_and_hear_the_lighthouse_when_it_is_back(tmp_path: Path) -> None:
    write_slow_script(tmp_path / "slow.py", tmp_path / "hurry", 0.3)
    with TorchrunJob(tmp_path, SETTINGS.replace("FOLDER", str(tmp_path))) as job:
        supervisors = [job.replica(r) for r in (0, 1)]
        job.until(lambda: job.step(0) >= 2 and job.step(1) >= 2, "both train")
        lives = {row["incarnation"] for r in (0, 1) for row in job.rows(r)}
        token = (job.run / "token").read_text().strip()
        said = json.loads((job.run / "lighthouse.json").read_text())
        port = urlsplit(said["url"]).port or 0
        os.kill(said["pid"], signal.SIGKILL)
        job.lighthouse.wait()
        with SquatterServer(port) as squatter:
            at = job.step(0)
            job.until(lambda: squatter.asked("/v1/processes") >= 16, "supervisors report to the squatter")
            job.until(lambda: squatter.asked("/v1/quorum") >= 8, "replicas ask the squatter")
            job.until(lambda: job.step(0) >= at + 5 and job.step(1) >= at + 5, "they train on")
            assert [p.poll() for p in supervisors] == [None, None]
            came = "".join(headers for _, headers, _ in squatter.seen) + str([body for *_, body in squatter.seen])
            assert not [secret for secret in (token, worker_token(token)) if secret in came]
            assert "Cookie" not in came
        job.lighthouse_again(port)
        (tmp_path / "hurry").touch()
        finals = job.finals(supervisors)
        assert {row["incarnation"] for r in (0, 1) for row in job.rows(r)} == lives, "a rank was started again"
        assert {final["step"] for final in finals} == {STEPS}
        assert "the job's token" in job.tails()

"""Kernels against the reference and the host's side of the handshake, interpreted: the variable must be set before
triton is imported, so they run in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed (pip install triton)")

HERE = Path(__file__).parent


def run(*arguments, **variables):
    environment = os.environ | variables
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=HERE.parents[1], env=environment, capture_output=True, text=True,
        timeout=250, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_interpreted_cases():
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:schemathesis")
    code, said = run("pytest", *options, str(HERE / "interpreted_cases.py"), TRITON_INTERPRET="1")
    assert code == 0, said


@pytest.mark.proof
@pytest.mark.multiproc
def test_the_bench_without_a_gpu_checks_a_ring_of_processes_and_a_kill(tmp_path):
    code, said = run("ftar_kernels.bench", "--only", "processes", "--json", str(tmp_path / "report.json"))
    assert code == 0, said
    report = json.loads((tmp_path / "report.json").read_text())
    assert [row["ok"] for row in report["processes"]["rows"]] == [True] * 2
    if report["device"] is None:
        assert "no GPU" in report["skipped"]

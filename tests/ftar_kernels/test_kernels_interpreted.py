"""Kernels against the reference and the host's side of the handshake, interpreted: the variable must be set before
triton is imported, so they run in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed (pip install triton)")

from ftar_kernels.handshake import uninterpretable

if uninterpretable():
    pytest.skip(uninterpretable(), allow_module_level=True)

HERE = Path(__file__).parent


def run(*arguments, **variables):
    environment = os.environ | variables
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=HERE.parents[1], env=environment, capture_output=True, text=True,
        timeout=250, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("cases", ["ftar_kernels/interpreted_cases.py", "ftar/gpu_plane_cases.py"])
def test_interpreted_cases(cases):
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:schemathesis")
    code, said = run("pytest", *options, str(HERE.parent / cases), TRITON_INTERPRET="1")
    assert code == 0, said


@pytest.mark.proof
@pytest.mark.multiproc
def test_the_bench_without_a_gpu_checks_a_ring_of_processes_and_a_kill(tmp_path):
    code, said = run("benchmarks.kernels", "--only", "processes", "ladder", "--out", str(tmp_path))
    assert code == 0, said
    report = json.loads((tmp_path / "results.json").read_text())
    assert [row["ok"] for row in report["sections"]["processes"]["rows"]] == [True] * 2
    if report["device"] is None:
        assert "ladder: needs a GPU, 60 s at most. Try one mechanism" in said


SITE = """
from benchmarks.kernels import sections
sections.SECTIONS["compiled"] = sections.BenchSection(3, lambda: __import__("time").sleep(600), gpu=False)
sections.SECTIONS["interpreted"] = sections.BenchSection(60, lambda: 1 / 0, gpu=False)
"""


def test_a_section_that_hangs_is_killed_and_one_that_fails_says_why(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SITE)
    path = os.pathsep.join([str(tmp_path), str(HERE.parents[1])])
    only = ("--only", "compiled", "interpreted", "--out", str(tmp_path))
    code, said = run("benchmarks.kernels", *only, PYTHONPATH=path)
    assert code == 1, said
    found = json.loads((tmp_path / "results.json").read_text())["sections"]
    assert found["compiled"]["error"] == "not finished after 3 s"
    assert "most recent call first" in (tmp_path / "compiled.log").read_text()
    assert found["interpreted"]["error"] == "ZeroDivisionError: division by zero"

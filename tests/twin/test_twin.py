"""What a GPU machine without a package registry would run, in an environment like its own (`make twin`)."""

import importlib
import json
import os
import pkgutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import ft_hsdp
import ftar_kernels
import lighthouse

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]
ABSENT = {"accelerate", "lightning", "pandas", "ray", "torchdata", "torchft", "torchtitan", "transformers"}
ABSENT |= {"wandb"}


def run(*arguments: str, **variables: str) -> str:
    """Run a module of this Python; return what it wrote."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=os.environ | variables, capture_output=True, text=True,
        timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_every_module_is_imported_but_those_of_absent_packages() -> None:
    missing = set()
    for package in (ft_hsdp, lighthouse, ftar_kernels):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if found.name.endswith("__main__"):
                continue
            try:
                importlib.import_module(found.name)
            except ModuleNotFoundError as error:
                missing.add(str(error.name).partition(".")[0])
    assert missing <= ABSENT


def test_the_kernels_compile_and_launch_as_they_should() -> None:
    assert "persistent_kernel" in run("-m", "benchmarks.kernels.compile_check")


def test_the_bench_runs_what_needs_no_gpu(tmp_path: Path) -> None:
    said = run("-m", "benchmarks.kernels", "--out", str(tmp_path))
    found = json.loads((tmp_path / "results.json").read_text())["sections"]
    assert all(each["ok"] for each in found.values()), said
    assert ("skipped" in found["interpreted"]) == (version("triton") < "3.7")


def test_a_job_on_the_cpu_with_a_kill_trains_every_unit_once(tmp_path: Path) -> None:
    options = ("--train.device=cpu", "--train.steps=40", f"--job.runs_dir={tmp_path}")
    said = run("launcher.py", "up", "configs/gpu.yaml", *options)
    assert "replicas equal" in said, said
    run("launcher.py", "verify", str(tmp_path / "gpu"))

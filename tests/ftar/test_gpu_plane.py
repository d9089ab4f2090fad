"""The GPU plane on the CPU: kernels are interpreted, which has to be said before triton is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ft_hsdp

HERE = Path(__file__).parent


def test_interpreted_cases() -> None:
    pytest.importorskip("triton", reason="triton is not installed (pip install triton)")
    from ftar_kernels.handshake import uninterpretable

    if uninterpretable():
        pytest.skip(uninterpretable())
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:schemathesis")
    command = [sys.executable, "-m", "pytest", *options, str(HERE / "gpu_plane_cases.py")]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_only_a_job_on_a_device_may_import_the_kernels() -> None:
    root = Path(ft_hsdp.__file__).parent
    users = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        for line in path.read_text().splitlines()
        if line.lstrip().startswith(("import ", "from ")) and ("ftar_kernels" in line or "dataplane.gpu" in line)
    }
    assert users <= {"ftar/dataplane/gpu.py", "train/device.py"}

"""`python -m ftar_kernels.bench [--json FILE] [--only SECTION ...]`: checks and measures the kernels.

Each section runs in a process of its own under a limit. Without a GPU the compile check and the interpreter's
checks run. The exit code is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import triton

from ftar_kernels.bench import sections

LIMIT_S = 420


def run(name: str) -> dict[str, Any]:
    """Run one section in a process of its own; an error becomes a part of the result."""
    environment = dict(os.environ)
    if name in sections.INTERPRETED:
        environment["TRITON_INTERPRET"] = "1"
    else:
        environment.pop("TRITON_INTERPRET", None)
        # A kernel that is loaded on its first launch waits for those that spin; streams that share a queue do too.
        environment |= {"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "ftar_kernels.bench", "--section", name, "--json", str(result)]
        process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        try:
            errors = process.communicate(timeout=LIMIT_S)[1]
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return {"ok": False, "error": f"not finished after {LIMIT_S} s"}
        if process.returncode or not result.exists():
            return {"ok": False, "error": errors.strip()[-2000:]}
        return json.loads(result.read_text()) | {"seconds": round(time.monotonic() - begin, 1)}


def lines(name: str, result: dict[str, Any]) -> str:
    """Format the result of a section for the terminal."""
    text = f"{name}: {'ok' if result['ok'] else 'FAILED'}"
    rows = result.get("rows", [])
    text += "".join(f"  {k} {_short(v)}" for k, v in result.items() if k not in ("ok", "rows")) + "\n"
    return text + "".join("    " + "  ".join(f"{k} {_short(v)}" for k, v in row.items()) + "\n" for row in rows)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_short, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} {_short(v)}" for k, v in value.items()) + "}"
    return str(value)


def main(arguments: list[str]) -> int:
    """Run all sections, or those of `--only`, and print their results; return 1 if one failed."""
    names = [*sections.ANYWHERE, *sections.ON_GPU]
    parser = argparse.ArgumentParser("python -m ftar_kernels.bench", description="Check and measure the kernels.")
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="these sections alone")
    parser.add_argument("--section", choices=names, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.section:
        result = (sections.ANYWHERE | sections.ON_GPU)[options.section]()
        Path(options.json).write_text(json.dumps(result))
        return 0
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    report: dict[str, Any] = {
        "device": device, "torch": torch.__version__, "triton": triton.__version__, "date":
        time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    left_out = sections.INTERPRETED if device else tuple(sections.ON_GPU)
    wanted = [name for name in options.only if name not in left_out or options.only is not names]
    for name in wanted:
        report[name] = run(name)
        sys.stdout.write(lines(name, report[name]))
        sys.stdout.flush()
    if device is None:
        report["skipped"] = "no GPU: the compile check and the interpreter's checks alone were run"
        sys.stdout.write(report["skipped"] + "\n")
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(report[name]["ok"] for name in wanted) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

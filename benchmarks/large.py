"""`python -m benchmarks.large`: a model of half a billion parameters on CPUs, with a replica that is killed.

Two replicas of one rank train it by SGD, so that a machine with 24 GiB is enough. The second one is killed, comes
back and fetches the state. Beside it FSDP2 trains the same model alone. It prints JSON: seconds, and the peak
memory of a rank in GiB.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch.distributed.fsdp import fully_shard

import ft_hsdp
from benchmarks.kernels.gpu_step import LAYERS, WIDTH, Mlp, Noise

ROOT = Path(__file__).parents[1]
TOKENS, STEPS, KILLED_AT = 32, 10, 4
LIMIT_S = 900
CPU = torch.device("cpu")


def peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def train() -> None:
    """Train as a rank of the job, and write down its peak memory; the job's entry."""
    job = ft_hsdp.join()
    folder = Path(job.config.job.runs_dir)
    width, layers = json.loads((folder / "sizes.json").read_text())
    model = job.shard(Mlp(width, layers))
    optim = job.optimizer(torch.optim.SGD(model.parameters(), lr=1e-6))
    for batch in job.batches(Noise(CPU, TOKENS, width)):
        model(batch).backward()
        optim.step()
    (folder / f"peak-{job.replica}").write_text(str(peak_gib()))


def alone(width: int, layers: int) -> None:
    """Train with FSDP2 alone, one rank, and print its figures."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(1)
    model = Mlp(width, layers)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    sgd, noise, took = torch.optim.SGD(model.parameters(), lr=1e-6), Noise(CPU, TOKENS, width), []
    for index in range(4):
        began = time.perf_counter()
        model(noise.batch(0, index, 0)).backward()
        sgd.step()
        sgd.zero_grad()
        took.append(time.perf_counter() - began)
    parameters = sum(p.numel() for p in model.parameters())
    found = {"parameters": parameters, "step_s": statistics.median(took[1:]), "peak_gib": peak_gib()}
    sys.stdout.write(json.dumps(found))


def run(width: int, layers: int) -> dict[str, Any]:
    """Return the figures of both, ready for JSON."""
    plain = subprocess.run(
        [sys.executable, "-m", "benchmarks.large", "--alone", "--width", str(width), "--layers", str(layers)],
        cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=True,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        config = {
            "job": {"name": "large", "runs_dir": made}, "entry": "benchmarks.large:train",
            "replicas": 2, "ranks_per_replica": 1, "state": {"snapshot": "on_demand"}, "optim": {"clip": None},
            "train": {"steps": STEPS, "threads": 1}, "chaos": [{"at_step": KILLED_AT, "replicas": [1]}],
        }  # fmt: skip
        (folder / "sizes.json").write_text(json.dumps([width, layers]))
        (folder / "job.yaml").write_text(yaml.safe_dump(config))
        up = [sys.executable, "launcher.py", "up", str(folder / "job.yaml")]
        done = subprocess.run(up, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        if done.returncode:
            return {"exit code": done.returncode, "said": (done.stdout + done.stderr)[-3000:]}
        rows = [json.loads(line) for line in (folder / "large" / "metrics.jsonl").read_text().splitlines()]
        summary = json.loads((folder / "large" / "summary.json").read_text())
        return {
            "alone": json.loads(plain.stdout),
            "step_s": [round(row["step_s"], 2) for row in rows],
            "contributors": [len(row["contributors"]) for row in rows],
            "waits_s": {key: round(max(row["waits"][key] for row in rows), 2) for key in rows[0]["waits"]},
            "digests": len({each["digest"] for each in summary["replicas"].values()}),
            "batches": summary["batches"],
            "recoveries": summary["recoveries"],
            "peak_gib": {path.name: round(float(path.read_text()), 2) for path in folder.glob("peak-*")},
        }


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m benchmarks.large", description=__doc__)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--layers", type=int, default=LAYERS, help=f"{LAYERS} are 0.54e9 parameters, 7 are 0.94e9")
    parser.add_argument("--alone", action="store_true", help="FSDP2 alone")
    options = parser.parse_args()
    if options.alone:
        alone(options.width, options.layers)
    else:
        sys.stdout.write(json.dumps(run(options.width, options.layers), indent=1) + "\n")

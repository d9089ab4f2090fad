"""`python -m benchmarks.kernels.gpu_step`: a training step on a GPU, plain FSDP2 and ft_hsdp, in one process.

It starts a job of one replica with one rank; `train` is the job's entry. It prints JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import ft_hsdp

ROOT = Path(__file__).parents[2]
WIDTH = 4096
LAYERS = 4  # 0.54e9 parameters
TOKENS = 2048
WARM, STEPS = 3, 5  # steps before the measured ones, measured steps
LIMIT_S = 150


class Mlp(nn.Module):
    """A stack of residual blocks: hidden states [tokens, width] in, a loss out."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Return a loss, a scalar."""
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return hidden.square().mean()


class Noise:
    """Batches that are made on the device."""

    def __init__(self, device: torch.device, tokens: int, width: int) -> None:
        self._random = torch.Generator(device).manual_seed(1)
        self._shape = (tokens, width)

    def batch(self, shard: int, index: int, rank: int, micro: int = 0) -> Tensor:
        """Return a batch; its content does not matter here."""
        return torch.randn(self._shape, generator=self._random, device=self._random.device)


class PartTimer:
    """Times the parts of a step, each until the device is done, and counts how often the host waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.parts: dict[str, list[float]] = {}
        self.waits: dict[str, int] = {}

    def part(self, name: str, work: Callable[..., Any], *arguments: Any) -> Any:
        """Call `work` as the part `name`, and return what it returns."""
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            self._watch("warn")
            begin = time.perf_counter()
            result = work(*arguments)
            queued = time.perf_counter() - begin
            self._watch("default")
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        self.parts.setdefault(name, []).append(time.perf_counter() - begin)
        self.parts.setdefault(f"{name}, queued", []).append(queued)
        self.waits[name] = sum("synchroniz" in str(each.message) for each in seen)
        return result

    def _watch(self, mode: str) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_sync_debug_mode(mode)

    def result(self) -> dict[str, Any]:
        """Return medians of the measured steps in ms, waits of the last one, and the device's memory in GiB."""
        found: dict[str, Any] = {n: 1e3 * statistics.median(t[WARM:]) for n, t in self.parts.items()}
        found["waits"] = self.waits
        if self._device.type == "cuda":
            found["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
            torch.cuda.reset_peak_memory_stats()
        return found


def steps(meter: PartTimer, model: nn.Module, optimizer: Any, batches: Iterator[Tensor]) -> None:
    """Train one step for each batch."""
    for batch in batches:
        loss = meter.part("forward", model, batch)
        meter.part("backward", loss.backward)
        meter.part("optimizer", optimizer.step)
        if not hasattr(optimizer, "clip"):
            optimizer.zero_grad()


def train() -> None:
    """Train plain FSDP2, then the same model as a job; write both figures into the job's folder."""
    job = ft_hsdp.join()
    folder = Path(job.config.job.runs_dir)
    width, layers, tokens = json.loads((folder / "sizes.json").read_text())
    noise = Noise(job.device, tokens, width)
    report = {"plain": plain(job.device, Mlp(width, layers), noise)}
    model = job.shard(Mlp(width, layers))
    optim = job.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-5))
    job.warm_up(lambda: model(noise.batch(0, 0, 0)).backward())
    ours = PartTimer(job.device)
    batches = job.batches(noise, 1)
    steps(ours, model, optim, itertools.islice(batches, WARM + STEPS))
    report["ours"] = ours.result()
    with torch.profiler.profile() as profiler:  # of one step more
        steps(PartTimer(job.device), model, optim, batches)
    profiler.export_chrome_trace(str(folder / "trace.json.gz"))
    (folder / "report.json").write_text(json.dumps(report))


def plain(device: torch.device, model: Mlp, noise: Noise) -> dict[str, Any]:
    """Return the figures of FSDP2 alone; its memory is free afterwards."""
    model = model.to(device)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-5)
    meter = PartTimer(device)
    steps(meter, model, adam, (noise.batch(0, i, 0) for i in range(WARM + STEPS)))
    return meter.result()


def run(
    device: str = "cuda", width: int = WIDTH, layers: int = LAYERS, tokens: int = TOKENS, trace: Path | None = None
) -> dict[str, Any]:
    """Return the parts of a step, in ms: until they were queued, and until the device had done them.

    A file `trace` gets the profile of one step, for chrome://tracing.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = {
            "job": {"name": "step", "runs_dir": folder}, "entry": "benchmarks.kernels.gpu_step:train",
            "replicas": 1, "ranks_per_replica": 1, "train": {"device": device, "steps": WARM + STEPS + 1},
        }  # fmt: skip
        (Path(folder) / "sizes.json").write_text(json.dumps([width, layers, tokens]))
        (Path(folder) / "step.yaml").write_text(yaml.safe_dump(config))
        done = subprocess.run(
            [sys.executable, "launcher.py", "up", f"{folder}/step.yaml"], cwd=ROOT, capture_output=True, text=True,
            timeout=LIMIT_S, check=False,
        )  # fmt: skip
        report = Path(folder) / "report.json"
        if done.returncode or not report.exists():
            return {"ok": False, "error": (done.stdout + done.stderr)[-2000:]}
        if trace is not None:
            shutil.copy(Path(folder) / "trace.json.gz", trace)
        rows = [json.loads(line) for line in (Path(folder) / "step" / "metrics.jsonl").read_text().splitlines()]
        found: dict[str, Any] = {"ok": True, **json.loads(report.read_text())}
        found["step_s"] = statistics.median(row["step_s"] for row in rows[WARM:-1])
        found["waits_s"] = {k: statistics.median(r["waits"][k] for r in rows[WARM:-1]) for k in rows[-1]["waits"]}
        found["ftar_s"] = statistics.median(row["ftar_s"] for row in rows[WARM:-1])
        return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        "python -m benchmarks.kernels.gpu_step", description="Measure a step on a GPU."
    )
    parser.add_argument("--layers", type=int, default=LAYERS, help=f"{LAYERS} are 0.54e9 parameters, 7 are 0.94e9")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="for the profile of one step (.json.gz)")
    options = parser.parse_args()
    sys.stdout.write(json.dumps(run(layers=options.layers, trace=options.trace), indent=1) + "\n")

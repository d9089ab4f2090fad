"""Real jobs beside the model: ``python tests/scenarios/effective.py FOLDER``, about an hour; see ``--help``.

Each job trains steps that wait, so that more replicas than cores do not slow each other down, while ranks or hosts
are lost at random times. The model knows when, how long a step takes, and the phases of recoveries: once those of
the job itself, by its own events, and once those of a shorter job of the same kind before it, with other failures.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # this file is a command, too

import yaml

from benchmarks.jobs import TRAINING, Setup, job_config
from ft_hsdp.config import dump
from tests.support.started_job import ROOT, launcher

STEP_S = 0.1  # for which a step waits
FIRST_S = 8.0  # before it nothing fails: there may be no checkpoint
CALIBRATE_S, MOST_S = 120.0, 12.0  # how long the first job of a kind takes, and the mean time between its failures
END_S = 60.0
POINTS = 3.0  # that a prediction may be off


@dataclass(frozen=True)
class Case:
    kind: str
    replicas: int
    every_s: float  # mean time between two failures

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.every_s:.0f}"

    def config(self, folder: Path, name: str, last_s: float, seed: int) -> Path:
        """Write the configuration of a job of this kind whose failures end ``last_s`` seconds after its start."""
        setup = Setup(replicas=self.replicas, wait_s=STEP_S)
        chance, t, chaos = random.Random(seed), FIRST_S, list[dict[str, Any]]()
        while (t := t + chance.expovariate(1 / self.every_s)) < last_s:
            hit = {"at_s": round(t, 2), "replicas": [chance.randrange(self.replicas)], "rank": 0}
            chaos.append(hit | ({"kind": "host", "for_s": 0.5} if self.kind == "alone" else {"signal": "KILL"}))
        more: dict[str, Any] = {"spares": 1} if self.kind == "spare" else {}
        if self.kind == "alone":  # its state is lost with its host: it goes back to the checkpoint
            more = {"checkpoint": {"every": 50}, "memory": {"copies": 1}, "hosts": {"per_replica": 1}}
            more["quorum"] = {"on_lost_head": "rollback"}
        job = {"name": name, "runs_dir": str(folder / "runs")}
        entry = {"entry": f"{TRAINING}:main", "args": [json.dumps(asdict(setup))], "preload": [TRAINING]}
        config = yaml.safe_load(dump(job_config(setup, folder / "runs", **entry, chaos=chaos, **more)))
        file = folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(config | {"job": config["job"] | job}))
        return file


CASES = (
    Case("cold", 4, 20.0),
    Case("spare", 4, 20.0),
    Case("cold", 3, 60.0),
    Case("spare", 3, 120.0),
    Case("alone", 1, 60.0),
)


def train(folder: Path, file: Path, seconds: float) -> Path:
    """Run a job for so long; the folder of its run."""
    with (folder / f"{file.stem}.log").open("wb") as log:
        command = [sys.executable, str(ROOT / "launcher.py"), "up", str(file)]
        with subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log) as job:
            try:
                job.wait(seconds)
            except subprocess.TimeoutExpired:
                job.send_signal(signal.SIGTERM)
                job.wait(END_S)
            finally:
                job.kill()
    return folder / "runs" / file.stem


def goodput(run: Path, *words: str) -> dict[str, Any]:
    done = launcher("goodput", str(run), "--json", *words)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="a new folder")
    parser.add_argument("--minutes", type=float, default=10.0, help="of each job")
    parser.add_argument("--only", choices=[case.name for case in CASES], help="one of them")
    args = parser.parse_args()
    args.folder.mkdir(parents=True)
    cases = [case for case in CASES if args.only in (None, case.name)]
    off, phases = list[list[float]](), dict[str, Path]()
    print(f"{'':12}{'measured':>12}{'own phases':>12}{'of another':>12}", flush=True)
    for seed, case in enumerate(cases, 1):
        if case.kind not in phases:
            before = Case(case.kind, case.replicas, min(MOST_S, case.every_s))
            file = before.config(args.folder, f"{case.kind}-before", CALIBRATE_S, -seed)
            phases[case.kind] = args.folder / f"{case.kind}.json"
            phases[case.kind].write_text(json.dumps(goodput(train(args.folder, file, CALIBRATE_S))))
        seconds = 60.0 * args.minutes
        run = train(args.folder, case.config(args.folder, case.name, seconds, seed), seconds)
        found, other = goodput(run), goodput(run, "--phases", str(phases[case.kind]))["predicted"]
        measured, own = found["measured"], found["predicted"]
        ratios = [100 * each["useful_s"] / own["wall_s"] for each in (measured, own, other)]
        off.append([abs(ratio - ratios[0]) for ratio in ratios[1:]])
        told = f"{own['failures']} failures, {own['fallbacks']} to the checkpoint"
        print(f"{case.name:12}" + "".join(f"{ratio:10.2f} %" for ratio in ratios) + f"  {told}", flush=True)
    near = [sum(each <= POINTS for each in way) for way in zip(*off, strict=True)]
    print(f"within {POINTS:g} points: {near[0]} of {len(off)} by own phases, {near[1]} by those of another job")
    return int(near[0] < len(off))


if __name__ == "__main__":
    sys.exit(main())

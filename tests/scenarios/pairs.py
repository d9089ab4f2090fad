"""Random pairs of faults on real jobs: ``python tests/scenarios/pairs.py --pairs 300 --seed 1 --report FILE``.

The second fault of a pair comes while the first is in force or is recovered from. Several pairs go through one job
of 3 x 2; one that stays for good has a job of its own. After each: no standstill beyond 30 s. After each job: one
state, no batch twice, none skipped, all steps, and nothing that `verify` objects to. Jobs are added to the report;
pairs in it are not run again.
"""

import argparse
import contextlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # this file is a command, too

import psutil

from ft_hsdp.errors import ConfigError
from ft_hsdp.launch.run.directory import RunDir, Tailer, read_jsonl
from tests.support import os_faults
from tests.support.launch.launch_rows import written
from tests.support.scenarios.pairs_plan import REPLICAS, Fault, Pair, pair
from tests.support.scenarios.scenario_job import Job
from tests.support.started_job import check

ROOT = Path(__file__).parents[2]
STANDSTILL_S = 30.0
BACK_S = 45.0  # after this long the next pair does not wait any more for a replica that is away
HIT_S = 10.0  # how long a fault waits for somebody to hit
PAIR_S = 8.0  # what a pair takes, about
BATCH = 8  # pairs of one job
CALM_STEPS = 3  # before the first fault, and for the end of the job
END_S = 240.0  # longer than 1.5 x timeouts.final_wait_s and timeouts.stop_s together
LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Seen:
    """A new step was committed: when, on the monotonic clock, and who contributed."""

    t: float
    step: int
    contributors: frozenset[int]


class Watch:
    """Looks at a run until it is closed."""

    def __init__(self, run: RunDir, replicas: int) -> None:
        self.seen: list[Seen] = []
        self._run = run
        self._logs = [Tailer(run.commits(n)) for n in range(replicas)]
        self._replicas = replicas
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._over.set()
        self._thread.join()

    @property
    def useful_s(self) -> float:
        """The time in which was trained: each step up to twice the median one, by the share that contributed."""
        gaps = [(b.t - a.t, len(b.contributors)) for a, b in pairwise(self.seen)]
        most = 2 * median([gap for gap, count in gaps if count == self._replicas] or [0.0])
        return sum(min(gap, most) * count / self._replicas for gap, count in gaps)

    @property
    def step(self) -> int:
        return self.seen[-1].step if self.seen else 0

    def since(self, t: float) -> list[Seen]:
        return [s for s in self.seen if s.t > t]

    def stalled_s(self, since: float, until: float) -> float:
        """The longest time without a commit between two times."""
        times = [since, *(s.t for s in self.seen if since < s.t < until), until]
        return max(b - a for a, b in pairwise(times))

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            now = time.monotonic()
            rows = [row for log in self._logs for row in log.poll()]
            for row in sorted(rows, key=lambda row: (row["step"], row["epoch"])):
                if row["step"] > self.step:
                    self.seen.append(Seen(now, row["step"], frozenset(row["contributors"])))


Row = dict[str, Any]


def numbers_done(jobs: Sequence[Row], seed: int) -> set[int]:
    """The numbers of the pairs of this seed that were run."""
    return {pair["number"] for job in jobs if job["seed"] == seed for pair in job["pairs"]}


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which so large a share lies; 0 where there is none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def spread(values: Sequence[float]) -> str:
    """p50, p99 and max."""
    p50, p99 = percentile(values, 0.5), percentile(values, 0.99)
    return f"p50 {p50:.2f}, p99 {p99:.2f}, max {max(values, default=0.0):.2f} s"


def lines(jobs: Sequence[Row]) -> list[str]:
    pairs = [pair for job in jobs for pair in job["pairs"]]
    kinds = Counter(fault["name"] for pair in pairs for fault in pair["faults"] if not fault["missed"])
    missed = sum(fault["missed"] != "" for pair in pairs for fault in pair["faults"])
    wall, useful = sum(job["wall_s"] for job in jobs), sum(job["useful_s"] for job in jobs)
    back = [pair["recovered_s"] for pair in pairs if pair["recovered_s"] is not None]
    told = [
        f"{len(pairs)} pairs of faults in {len(jobs)} jobs, {wall / 60:.1f} minutes; seeds "
        f"{', '.join(map(str, sorted({job['seed'] for job in jobs})))}",
        f"faults    {', '.join(f'{kind} {n}' for kind, n in sorted(kinds.items()))}; {missed} found nobody to hit",
        f"stall     {spread([pair['stalled_s'] for pair in pairs])} without a commit after the later fault",
        f"recovery  {spread(back)} until all contribute again ({len(back)} of {len(pairs)} pairs)",
        f"goodput   {useful / wall:.3f} of the time trained" if wall else "goodput   -",
        f"steps     {sum(job['steps'] for job in jobs)}",
    ]
    breaches = [(job, breach) for job in jobs for breach in job["breaches"]]
    told.append(f"breaches  {len(breaches)}")
    told += [f"  seed {job['seed']}, pairs {_numbers(job)}, commit {job['commit']}: {b}" for job, b in breaches]
    return told


def _numbers(job: Mapping[str, Any]) -> str:
    return ", ".join(str(pair["number"]) for pair in job["pairs"])


class Injured:
    def __init__(self, job: Job, steps: int) -> None:
        self.job, self.steps = job, steps
        self.run = RunDir(job.run.resolve())
        self.pairs: list[dict[str, Any]] = []
        self.breaches: list[str] = []
        self.watch = Watch(self.run, REPLICAS)

    @property
    def room(self) -> bool:
        return self.job.process.poll() is None and self.watch.step < self.steps - CALM_STEPS

    def hit(self, fault: Fault) -> tuple[str, float]:
        """Inflict a fault, and have it lifted; why not, or "", and when it ends, on the monotonic clock."""
        injection, end = fault.injection, time.monotonic() + HIT_S
        while True:
            try:
                made = os_faults.inflict(self.run, injection, fault.seconds)
                break
            except (ConfigError, OSError, psutil.Error) as error:
                if time.monotonic() > end or self.job.process.poll() is not None:
                    return str(error), time.monotonic()
                time.sleep(0.2)
        replica = injection.replica if injection.replica is not None else 0
        written(self.run.injections(replica), made.event)
        now = time.monotonic()
        if injection.for_s == 0:
            return "", now

        def lift() -> None:
            written(self.run.injections(replica), made.lifted(f"{injection.for_s:g} s are over"))

        threading.Timer(injection.for_s, lift).start()
        return "", now + injection.for_s

    def injure(self, two: Pair) -> bool:
        """One pair; whether the job is fit for another one."""
        began = time.monotonic()
        first, end = self.hit(two.first)
        time.sleep(two.delay_s)
        second, later = self.hit(two.second)
        end = max(end, later)
        time.sleep(max(0.0, end - time.monotonic()))
        recovered = self._recovered(end)
        now = time.monotonic()
        stalled = self.watch.stalled_s(end, now if recovered is None else end + recovered)
        faults = [
            {"name": fault.name, "whom": fault.injection.victim, "for_s": fault.injection.for_s, "missed": missed}
            for fault, missed in ((two.first, first), (two.second, second))
        ]
        self.pairs.append(
            {
                "number": two.number,
                "faults": faults,
                "delay_s": two.delay_s,
                "took_s": now - began,
                "stalled_s": stalled,
                "recovered_s": recovered,
            }
        )
        if stalled > STANDSTILL_S:
            self.breaches.append(f"pair {two.number}: no commit for {stalled:.1f} s")
        return recovered is not None

    def _recovered(self, end: float) -> float | None:
        """How long after ``end`` all contributed again, if they did; the end of the job counts as that."""
        while True:
            whole = next((s for s in self.watch.since(end) if len(s.contributors) == REPLICAS), None)
            if whole is not None:
                return whole.t - end
            if self.job.process.poll() is not None or self.watch.step >= self.steps:
                return time.monotonic() - end
            last = max(end, self.watch.seen[-1].t if self.watch.seen else 0.0)
            now = time.monotonic()
            if now - last > 2 * STANDSTILL_S or (now - end > BACK_S and now - last < STANDSTILL_S):
                return None
            time.sleep(0.05)

    def finish(self) -> None:
        """Wait for the end of the job and check it."""
        since = time.monotonic()
        while self.job.process.poll() is None:
            last = max(since, self.watch.seen[-1].t if self.watch.seen else 0.0)
            still = time.monotonic() - last
            if still > (END_S if self.watch.step >= self.steps else 2 * STANDSTILL_S):
                self.breaches.append(f"no commit, and no end, for {still:.0f} s at step {self.watch.step}")
                return
            time.sleep(0.1)
        try:
            check(self.job.end(), self.steps)
        except (AssertionError, OSError, ValueError) as error:
            self.breaches.append(str(error))
        if self.job.events("StateDiverged"):
            self.breaches.append("two live states differed (StateDiverged)")

    def told(self, seed: int) -> dict[str, Any]:
        self.watch.close()
        seen = self.watch.seen
        return {
            "seed": seed,
            "commit": _commit(),
            "pairs": self.pairs,
            "breaches": self.breaches,
            "steps": self.watch.step,
            "wall_s": seen[-1].t - seen[0].t if seen else 0.0,
            "useful_s": self.watch.useful_s,
        }


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "?"


def jobs(seed: int, numbers: list[int]) -> Iterator[list[Pair]]:
    together: list[Pair] = []
    for number in numbers:
        two = pair(seed, number)
        if two.lasting:
            yield [two]
            continue
        together.append(two)
        if len(together) == BATCH:
            yield together
            together = []
    if together:
        yield together


def run(seed: int, pairs: list[Pair], rate: float, keep: Path) -> tuple[dict[str, Any], list[Pair]]:
    """One job; its row in the report, and the pairs for which there was no time in it."""
    steps = max(60, int(rate * PAIR_S * len(pairs)))
    with tempfile.TemporaryDirectory(prefix="pairs-") as folder:
        with Job(Path(folder), steps, debug__faults=True, preload=[os_faults.MODULE]) as job:
            injured = Injured(job, steps)
            job.until(lambda: injured.watch.step >= CALM_STEPS, "the first steps")
            left = list(pairs)
            while left and injured.room and injured.injure(left.pop(0)):
                pass
            injured.finish()
            told = injured.told(seed)
        if told["breaches"]:
            where = keep / f"seed{seed}-pairs{pairs[0].number}"
            shutil.copytree(folder, where, dirs_exist_ok=True)
            print(f"breach: {'; '.join(told['breaches'])}; see {where}", flush=True)
    return told, left


def main() -> int:
    """Run what is missing, then print the whole report; 1 where something did not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, nargs="*", help="these pairs, whatever the report says")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no job after so long")
    parser.add_argument("--report", type=Path, default=Path("runs/pairs.jsonl"), help="runs add up in this file")
    parser.add_argument("--keep", type=Path, default=Path("runs/breaches"), help="folder for runs with a breach")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the job that runs ends, too
    end, rate = time.monotonic() + args.minutes * 60, 4.0
    known = numbers_done(read_jsonl(args.report), args.seed)
    left = args.only or [n for n in range(args.pairs) if n not in known]
    for pairs in list(jobs(args.seed, left)):
        while pairs and time.monotonic() < end:
            told, pairs = run(args.seed, pairs, rate, args.keep)
            written(args.report, told)
            rate = min(30.0, max(2.0, told["steps"] / max(told["wall_s"], 1.0)))
            for done in told["pairs"]:
                print(_line(done), flush=True)
    said = read_jsonl(args.report)
    print("\n".join(lines(said)))
    return 1 if any(job["breaches"] for job in said) else 0


def _line(done: dict[str, Any]) -> str:
    faults = [
        f"{f['name']} ({f['whom']}{'' if f['for_s'] == 0 else ' for ' + format(f['for_s'], 'g') + ' s'})"
        + (" missed" if f["missed"] else "")
        for f in done["faults"]
    ]
    back = "not all back" if done["recovered_s"] is None else f"whole after {done['recovered_s']:.1f} s"
    then = f"{faults[0]}, {done['delay_s']:g} s later {faults[1]}"
    return f"pair {done['number']}: {then}: stall {done['stalled_s']:.1f} s, {back}"


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())

"""How well the analysis of hangs and slowness names the culprits of emulated traces: the figures in the docs.

python -m tests.model.judged --seeds 500 --from 10000     # by kind, and how long an analysis takes
python -m tests.model.judged --ranks 32768                # one job of so many ranks
"""

from __future__ import annotations

import argparse
import time
from collections import Counter, defaultdict

from ft_hsdp.analysis.culprits import find, find_slow
from tests.model.traces import Case, Verdict, case, judge


def judged(found: Case) -> tuple[Verdict, int, float]:
    """Return the verdict on the analysis of a case, how many findings it has, and the seconds that it took."""
    began = time.perf_counter()
    findings = (find if found.stopped else find_slow)(found.heard).findings
    took_s = time.perf_counter() - began
    return judge(found, [frozenset(each.ranks) for each in findings]), len(findings), took_s


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--from", type=int, default=0, dest="first")
    parser.add_argument("--ranks", type=int)
    args = parser.parse_args()
    if args.ranks is not None:
        for kind in ("before", "lost"):
            verdict, _, took_s = judged(case(args.first, kind, replicas=64, ranks=args.ranks // 64))
            print(f"{kind}: {args.ranks} ranks, {took_s:.2f} s, named {verdict.exact}")
        return
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    longest_s = 0.0
    for seed in range(args.first, args.first + args.seeds):
        found = case(seed)
        verdict, findings, took_s = judged(found)
        longest_s = max(longest_s, took_s)
        for row in (found.kind, "all"):
            counts[row].update(
                cases=1, named=verdict.exact, narrowed=verdict.within, findings=findings, false=verdict.false
            )
    for row, seen in sorted(counts.items()):
        print(
            f"{row:<10}", *(f"{name} {seen[name]}" for name in ("cases", "named", "narrowed", "findings", "false"))
        )
    print(f"longest analysis {longest_s:.3f} s")


if __name__ == "__main__":
    main()

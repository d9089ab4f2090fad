"""`python tests/fuzz/fuzz.py [--runs N] [--seed N] [PARSER ...]`: made-up bytes for every parser of outside bytes.

One process for each parser, with a bound on its memory; a line of JSON for each. It ends with 1 if one of them
crashes, takes more memory or takes too long; the input is in the last lines of what it says.
"""

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parsers", nargs="*")
    parser.add_argument("--runs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--at-once", type=int, default=2, help="how many parsers (2)")
    parser.add_argument("--here", action="store_true")
    chosen = parser.parse_args()
    from tests.support.fuzz.fuzz_engine import bounded, fuzz
    from tests.support.fuzz.fuzz_targets import targets

    names = chosen.parsers or list(targets())
    if chosen.here:
        (name,) = names
        made = targets()[name]()
        bounded()
        print(
            json.dumps({"parser": name, "seed": chosen.seed, **fuzz(made, chosen.runs, chosen.seed)}), flush=True
        )
        return 0

    def run(name: str) -> int:
        command = [sys.executable, __file__, "--here", f"--runs={chosen.runs}", f"--seed={chosen.seed}", name]
        return subprocess.run(command, check=False).returncode

    with ThreadPoolExecutor(chosen.at_once) as pool:
        return int(any(pool.map(run, names)))


if __name__ == "__main__":
    sys.exit(main())

"""Check that the tests catch each fault in faults.txt: a small change of the source that breaks one guarantee.

Run it with ``python tests/support/faults.py [--only NAME] [--jobs 2]``, or all of them with ``make faults``.

The checkout is not touched. Each job copies the tracked files into a folder of its own. First the named tests run
on the unchanged copy, where they must pass. Then, for each fault, its text is replaced in the copy, its tests run
until one fails, and the text is put back. The command prints "caught" or "MISSED" for each fault, and exits with 1
if one is missed. A fault with which the tests cannot be collected counts as missed: it shows nothing.

An entry of faults.txt has the name and what would go wrong for a user, a file or folder, the text that is replaced
("-"), its replacement ("+"; none: nothing), and the tests of which one must fail ("!"). The text may be a part of
a line. It stands in the file, or in all modules of the folder together, exactly once.

The rules of the protocol have a list of their own: `MUTANTS` in tests/model/test_explore.py.
"""

import argparse
import itertools
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEST_S = 40  # longest time of one test: a fault may make it hang
FAULT_S = 180  # longest time of the tests of one fault
BASE_S = 900  # longest time of all named tests without a fault

_clock = itertools.count(int(time.time()))  # a new modification time for each write: Python compares whole seconds


@dataclass(frozen=True, slots=True)
class Fault:
    """A small change of the source that breaks one guarantee."""

    name: str
    harm: str  # what would go wrong for a user
    place: str  # a file or a folder, relative to the root
    old: str  # stands there exactly once
    new: str
    tests: tuple[str, ...]  # names of test functions, of which one must fail


def read() -> list[Fault]:
    entries = [e for e in Path(__file__).with_suffix(".txt").read_text().split("\n\n") if not e.startswith("#")]
    return [_parse(entry.strip("\n").split("\n")) for entry in entries]


def _parse(lines: list[str]) -> Fault:
    old, new, tests = ([line[1:] for line in lines[2:] if line.startswith(mark)] for mark in "-+!")
    name, _, harm = lines[0].partition(": ")
    return Fault(name, harm, lines[1], "\n".join(old), "\n".join(new), tuple(" ".join(tests).split()))


def tests() -> dict[str, list[str]]:
    """Return the files, relative to the root, that define each test function, by its name."""
    known: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name in re.findall(r"^(?:async )?def (test_\w+)\(", path.read_text(), re.MULTILINE):
            known.setdefault(name, []).append(str(path.relative_to(ROOT)))
    return known


def nodes(fault: Fault, known: dict[str, list[str]]) -> list[str]:
    """Return the pytest node ids of the tests that must catch ``fault``."""
    return [f"{file}::{name}" for name in fault.tests for file in known[name]]


def found(fault: Fault, tree: Path) -> list[Path]:
    """Return the module in which the text of ``fault`` stands, once for each time."""
    place = tree / fault.place
    modules = [place] if place.suffix else sorted(place.rglob("*.py"))
    return [module for module in modules for _ in range(module.read_text().count(fault.old))]


def problems(fault: Fault, known: dict[str, list[str]]) -> Iterator[str]:
    """Yield what makes an entry of the list useless: it does not apply exactly once, or names no test."""
    if len(found(fault, ROOT)) != 1:
        yield f"{fault.name}: its text stands {len(found(fault, ROOT))} times in {fault.place}: {fault.old!r}"
    if not fault.tests:
        yield f"{fault.name}: no test is named"
    for name in fault.tests:
        if name not in known:
            yield f"{fault.name}: no module of tests/ defines {name}"


def copy_tree(folder: Path) -> None:
    """Copy all files that git tracks or would track, as they are in the checkout."""
    listed = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def write(path: Path, text: str) -> None:
    """Write a source file with a new modification time, so that Python uses no compiled module of another text."""
    path.write_text(text)
    now = next(_clock)
    os.utime(path, (now, now))


@contextmanager
def applied(fault: Fault, tree: Path) -> Iterator[None]:
    """Put the fault into a copy of the tree, within a ``with`` block."""
    (path,) = found(fault, tree)
    text = path.read_text()
    write(path, text.replace(fault.old, fault.new))
    try:
        yield
    finally:
        write(path, text)


def run(tree: Path, ids: Iterable[str], limit_s: float) -> tuple[int, str]:
    """Run tests in a copy of the tree until one fails; return pytest's exit code and the end of its output.

    A run that takes longer than ``limit_s`` seconds is killed; its code is 1, like that of a failure.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"--timeout={TEST_S}", *ids]
    path = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=tree, env=os.environ | {"PYTHONPATH": path}, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            code = 1
        process.wait()
        output.seek(0)
        return code, output.read()[-3000:]


def check(faults: Sequence[Fault], jobs: int) -> list[Fault]:
    """Check faults, print a line for each, and return those that were missed.

    Raises:
        SystemExit: a test fails without a fault.
    """
    known = tests()
    missed: list[Fault] = []
    with tempfile.TemporaryDirectory(prefix="ft_hsdp-faults-") as folder:
        trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(jobs):
            copy_tree(Path(folder) / str(number))
            trees.put(Path(folder) / str(number))

        def one(fault: Fault) -> tuple[int, str, float]:
            tree, began = trees.get(), time.monotonic()
            try:
                with applied(fault, tree):
                    return *run(tree, nodes(fault, known), FAULT_S), time.monotonic() - began
            finally:
                trees.put(tree)

        ids = sorted({node for fault in faults for node in nodes(fault, known)})
        code, said = run(Path(folder) / "0", ids, BASE_S)
        if code:
            raise SystemExit(f"{said}\na test fails without a fault")
        with ThreadPoolExecutor(jobs) as pool:
            for fault, (code, said, took_s) in zip(faults, pool.map(one, faults), strict=True):
                print(f"{'caught' if code == 1 else 'MISSED'} {took_s:5.1f} s  {fault.name}", flush=True)
                if code != 1:
                    missed.append(fault)
                    print(f"  {fault.harm}" + ("" if code == 0 else f"\n  pytest ends with {code}:\n{said}"))
    return missed


def main() -> int:
    """Check all faults, or one; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="NAME", help="a fault by its name; may be repeated")
    parser.add_argument("--jobs", type=int, default=2, help="faults that are checked at once (default: 2)")
    options = parser.parse_args()
    chosen = [f for f in read() if not options.only or f.name in options.only]
    if not chosen:
        parser.error(f"no fault is called {options.only}")
    known = tests()
    if wrong := [problem for fault in chosen for problem in problems(fault, known)]:
        print(*wrong, sep="\n")
        return 1
    missed = check(chosen, options.jobs)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} faults are caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

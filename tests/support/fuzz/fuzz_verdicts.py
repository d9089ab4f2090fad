"""Prints what each parser of outside bytes says to the same inputs: one line of JSON, {parser: [verdict, ...]}."""

import json
import sys

from tests.support.fuzz.fuzz_engine import Mutator
from tests.support.fuzz.fuzz_targets import targets

SEED = 11


def verdicts(inputs: int) -> dict[str, list[str]]:
    """What the parsers say to `inputs` inputs each: the name of what they raise, or that they accept it."""
    found: dict[str, list[str]] = {}
    for name, make in sorted(targets().items()):
        parser = make()
        mutator = Mutator(parser.seeds, SEED)
        said = found[name] = []
        for data in [*parser.seeds, *(mutator.next() for _ in range(inputs))]:
            try:
                parser.parse(data)
            except Exception as error:
                said.append(type(error).__name__)
            else:
                said.append("accepted")
    return found


if __name__ == "__main__":
    print(json.dumps(verdicts(int(sys.argv[1]))))

"""The tables of docs/compatibility.md. `python -m tests.compatibility.table` writes them there."""

import os
import re
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from ft_hsdp.config import Config
from ft_hsdp.errors import ConfigError
from tests.compatibility.cases import CASES
from tests.compatibility.refused import REFUSED
from tests.train.test_job import made

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
BEGIN, END = "<!-- begin: {} -->", "<!-- end: {} -->"


def works() -> str:
    """The kinds of scripts that train as torch does."""
    rows = [f"| {case.title} | {case.tolerance:.0e} |" for case in CASES.values()]
    return "\n".join(["| script | largest difference from torch |", "|---|---|", *rows])


def refusals(folder: Path) -> dict[str, str]:
    """How each of `REFUSED` is refused. The default process group is of one rank."""
    found: dict[str, str] = {}
    for title, call in REFUSED.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # FSDP1 is deprecated
            try:
                call(made(folder, Config()))
            except ConfigError as error:
                found[title] = str(error)
            else:
                found[title] = "not refused"
    return found


def refused(messages: Mapping[str, str]) -> str:
    rows = [f"| {title} | `{message.replace('|', '/').replace('`', '')}` |" for title, message in messages.items()]
    return "\n".join(["| script | one line |", "|---|---|", *rows])


def written(text: str, name: str, table: str) -> str:
    begin, end = BEGIN.format(name), END.format(name)
    between = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    assert between.search(text), f"{PAGE.name} has no place for {name}"
    return between.sub(lambda _: f"{begin}\n{table}\n{end}", text)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{os.path.join(folder, 'store')}"
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        messages = refusals(Path(folder))
        dist.destroy_process_group()
    PAGE.write_text(written(written(PAGE.read_text(), "works", works()), "refused", refused(messages)))


if __name__ == "__main__":
    main()

"""`diagnose`: who keeps a job waiting, from its lighthouse or from a file with what its ranks had told."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import httpx
from pydantic import TypeAdapter, ValidationError

from ft_hsdp import secret, tls
from ft_hsdp.analysis.diagnosis import Dump, Json
from ft_hsdp.config import load
from ft_hsdp.control.lighthouse_client import get_proved, urls_of_run
from ft_hsdp.errors import ConfigError, LighthouseUnreachable, one_line
from ft_hsdp.launch.run.directory import RunDir, read_json

ANSWER_S = 10.0
SHOWN = 8  # collectives on the terminal
DUMPED = TypeAdapter(Dump)


def ask(run: RunDir) -> Dump:
    """Return what the lighthouse of a running job knows. Blocks for at most `ANSWER_S` for each lighthouse.

    Raises:
        LighthouseUnreachable: There is none, or none answers.
    """
    trusted, why = tls.trusted(load(run.config).network), "the run has none"
    for url in urls_of_run(read_json(run.lighthouse)):
        try:
            answer = get_proved(f"{url}/v1/diagnosis?traces=true", secret.current(run.token), ANSWER_S, trusted)
            return read(answer.raise_for_status().text, url)
        except (OSError, httpx.HTTPError, httpx.InvalidURL) as error:
            why = f"{url}: {error}"
    raise LighthouseUnreachable(f"no lighthouse answers: {why}")


def read(text: str, where: str) -> Dump:
    """Return a dump from its text. Raises ConfigError if it is none of this version of ft_hsdp."""
    try:
        return DUMPED.validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        found = f"{where}: {key}" if key else where
        raise ConfigError("dump", found, f"what `diagnose RUN --dump FILE` writes ({first['msg']})") from None


def load_dump(file: Path) -> Dump:
    """Return the dump in a file. Raises ConfigError if it cannot be read, or is none."""
    try:
        return read(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("dump", str(file), f"a file that can be read ({one_line(str(error))})") from None


def save(dump: Dump, file: Path) -> None:
    """Write a dump into a file. Raises OSError."""
    file.write_text(json.dumps(asdict(dump)), encoding="utf-8")


def lines(document: Json) -> list[str]:
    """Return the document of `diagnose --json` as lines of text."""
    found = [_head(document)]
    for pause in document["pauses"].items():
        found.append("  replica {} pauses: {}".format(*pause))
    for failure in document["failures"]:
        where = f"replica {failure['replica']}" + ("" if failure["rank"] is None else f" rank {failure['rank']}")
        found.append(f"  {where} {failure['said']}: {failure['cause']}")
    for finding in document["findings"]:
        found.append(f"  {finding['kind']}: {finding['why']}")
        found += [line for suspect in finding["suspects"] for line in _suspect(suspect)]
    if document["waits"]:
        found.append("  who waits for whom:")
    for wait in document["waits"][:SHOWN]:
        for_whom = _ranks(wait, "absent") or "each other"
        what = f"{wait['op'] or 'collective'}, number {wait['number']} of {wait['group']}"
        found.append(f"    {_ranks(wait, 'waiting')} wait in {what} for {for_whom}")
    left = len(document["waits"]) - SHOWN
    if left > 0:
        found.append(f"    and {left} more collectives")
    return found


def _head(document: Json) -> str:
    quiet, usual = document["quiet_s"], document["typical_s"]
    if quiet is None:
        return f"{document['job']}: no step yet"
    if document["stopped"]:
        return f"{document['job']}: no step for {quiet:.1f} s; one takes {usual:.2f} s"
    return f"{document['job']}: it trains, a step takes {usual:.2f} s"


def _suspect(suspect: Json) -> list[str]:
    name = f"replica {suspect['replica']} rank {suspect['rank']}"
    doing = f", {suspect['doing']}" if suspect["doing"] else ""
    found = [f"    {name}  host {suspect['host']}  pid {suspect['pid']}{doing}"]
    return found + [f"      {line}" for line in suspect["stack"]]


def _ranks(wait: Json, which: str) -> str:
    more = wait[f"{which}_in_all"] - len(wait[which])
    return ", ".join(wait[which]) + (f" and {more} more" if more else "")

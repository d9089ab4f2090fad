import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from ft_hsdp.analysis.diagnosis import Dump, describe
from ft_hsdp.errors import EXIT_CONFIG, EXIT_OK, ConfigError
from ft_hsdp.launch.cli import main
from ft_hsdp.launch.run.diagnose import lines, load_dump, save
from tests.lighthouse.overview.test_suspects import HUNG, STEP_S

DUMP = Dump("job", 1.7e9, True, 5.0, STEP_S, None, HUNG)


def test_a_dump_is_read_as_it_was_written_and_analysed_offline(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "dump.json"
    save(DUMP, file)
    assert load_dump(file) == DUMP
    assert main(["diagnose", str(file), "--json"]) == EXIT_OK
    assert json.loads(capsys.readouterr().out) == describe(DUMP)
    assert main(["diagnose", str(file)]) == EXIT_OK
    text = capsys.readouterr().out
    for part in ("no step for 5.0 s", "replica 1 rank 1  host gpu7  pid 41", "t.py:3 f", "1/0 wait in all_gather"):
        assert part in text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        json.dumps({"format": "other"}),
        json.dumps(asdict(DUMP) | {"format": "ft_hsdp traces 2"}),
    ],
)
def test_what_is_no_dump_of_this_version_is_refused_in_one_line(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "dump.json"
    file.write_text(text)
    with pytest.raises(ConfigError):
        load_dump(file)
    assert main(["diagnose", str(file)]) == EXIT_CONFIG
    assert capsys.readouterr().err.count("\n") == 1


def test_a_job_that_trains_or_pauses_says_so() -> None:
    assert lines(describe(replace(DUMP, stopped=False, quiet_s=0.1)))[0].startswith("job: it trains")
    assert lines(describe(replace(DUMP, quiet_s=None)))[0] == "job: no step yet"
    assert any("evaluates" in line for line in lines(describe(replace(DUMP, pauses={"1": "evaluates"}))))

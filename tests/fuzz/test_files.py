"""Odd files in a run directory and in a folder of checkpoints: no reader of them fails, hangs or is silent.

`FT_HSDP_FILE_SEEDS` is the number of seeds: more than the few of a usual run find more.
"""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ft_hsdp.jsonl import replace_json
from ft_hsdp.launch.cli import main
from ft_hsdp.launch.run.directory import RunDir, complain
from ft_hsdp.lifetime import identity
from ft_hsdp.state.checkpoint import catalog, drafts
from tests.launch.run.test_verify import model  # noqa: F401 - a fixture
from tests.state.test_checkpoint_catalog import KEY, checkpoint

SEEDS = range(int(os.environ.get("FT_HSDP_FILE_SEEDS", "3")))
READING = (["verify"], ["explain"], ["explain", "--json"], ["trace"], ["status"])


def removed(file: Path, _: random.Random) -> None:
    file.unlink()


def truncated(file: Path, chance: random.Random) -> None:
    os.truncate(file, chance.randrange(file.stat().st_size or 1))


def flipped(file: Path, chance: random.Random) -> None:
    data = bytearray(file.read_bytes() or b"0")
    for _ in range(chance.choice([1, 1, 8])):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    file.write_bytes(data)


def folder(file: Path, _: random.Random) -> None:
    file.unlink()
    file.mkdir()


def pipe(file: Path, _: random.Random) -> None:
    file.unlink()
    os.mkfifo(file)


def deep(file: Path, chance: random.Random) -> None:
    """Of all depths: some that a parser takes and what comes behind it does not."""
    levels = chance.choice([300, 900, 100_000])
    file.write_text(chance.choice(['{"t":1,"event":' + "[" * levels + "]" * levels + "}", "[" * levels]) + "\n")


def other(file: Path, chance: random.Random) -> None:
    """A field of some line has a value of another type."""
    data = file.read_bytes()
    values = list(re.finditer(rb'(?<=[:\[,])("[^"]*"|[0-9.]+)(?=[,\]}])', data))
    for found in chance.sample(values, min(1, len(values))):
        value = chance.choice([b"null", b"-1", b'"x"', b"[]", b"{}", b"1e308", b"true"])
        file.write_bytes(data[: found.start()] + value + data[found.end() :])


DAMAGES = (removed, truncated, flipped, folder, pipe, deep, other)


def files(below: Path) -> list[str]:
    return sorted(str(path.relative_to(below)) for path in below.rglob("*") if path.is_file())


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_reading_command_says_what_it_cannot_read(
    tmp_path: Path,
    model: Path,  # noqa: F811
    seed: int,
    damage: Callable[[Path, random.Random], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    chance = random.Random(f"{seed} {damage.__name__}")
    for name in files(model):
        run = RunDir(tmp_path / "job")
        shutil.copytree(model, run.path)
        replace_json(run.supervisor, identity())  # for `status`, it runs
        damage(run.path / name, chance)
        for command in (READING[0], chance.choice(READING[1:])):
            complain.cache_clear()
            code = main([*command, str(run.path)])
            said = capsys.readouterr()
            assert code in (0, 1, 64, 75), (name, command, said)
            assert "Traceback" not in said.err
            if damage in (folder, pipe) and command == ["verify"]:
                assert f"{name}: " in said.out or code == 64, (name, said)
        shutil.rmtree(run.path)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_damaged_checkpoint_costs_no_older_one(
    tmp_path: Path, seed: int, damage: Callable[[Path, random.Random], None]
) -> None:
    chance = random.Random(f"{seed} {damage.__name__}")
    older, newer = checkpoint(tmp_path, 1), checkpoint(tmp_path, 2)
    for name in files(newer):
        shutil.copytree(newer, tmp_path / "whole")
        damage(newer / name, chance)
        found = catalog.newest(tmp_path, KEY)
        same = (newer / name).is_file() and (newer / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
        assert found.checkpoint is not None
        assert found.checkpoint.path == (newer if same else older), name
        assert [each.name for each in found.skipped] == [] if same else [newer.name]
        assert drafts.sweep(tmp_path) == []
        assert drafts.retire(tmp_path, 1, older.name) == []
        shutil.rmtree(newer)
        (tmp_path / "whole").rename(newer)

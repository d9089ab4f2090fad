import errno
import os
import sys
from pathlib import Path

import pytest

from ft_hsdp.config import Config, agreed, config_hash, dump, load, parse
from ft_hsdp.config.entry import anchored, digest, locate, stamped, title
from ft_hsdp.core.replica_state import ENTRY, difference
from tests.support.refused import refused


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a script, and a package whose import fails."""
    (tmp_path / "train.py").write_text("print(1)\n")
    (tmp_path / "pack" / "inner").mkdir(parents=True)
    (tmp_path / "pack" / "__init__.py").write_text("raise SystemError('imported')\n")
    (tmp_path / "pack" / "inner" / "loop.py").write_text("def main(): pass\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_script_and_a_function_are_found_without_an_import(folder: Path) -> None:
    assert locate("train.py") == Path("train.py")
    assert locate("pack.inner.loop:main") == folder / "pack" / "inner" / "loop.py"  # inner is a namespace package
    assert locate("json.decoder:main").name == "decoder.py"
    assert "pack" not in sys.modules
    assert (title("a/b/train.py"), title("pack.inner.loop:main")) == ("train.py", "pack.inner.loop:main")


def test_what_cannot_be_run_is_one_line(folder: Path) -> None:
    (folder / "bad.py").write_text("def f(:\n")
    (folder / "null.py").write_bytes(b"\0")
    (folder / "dir.py").mkdir()
    (folder / "unread.py").symlink_to("/proc/self/mem")  # root, too, gets an error when it reads that
    for entry, why in {
        "gone.py": str(folder),
        "dir.py": "no file",
        "bad.py": "invalid syntax",
        "null.py": "null bytes",
        "unread.py": os.strerror(errno.EIO),
        "nowhere:main": "no module nowhere",
        "pack.other:main": "no module other",
        "train.b:main": "no package",
        "sys:exit": "no file",
    }.items():
        line = refused(lambda entry=entry: stamped(parse({"entry": entry})), key="entry")
        assert why in line


def test_an_edited_script_is_refused_with_the_way_out(folder: Path) -> None:
    began = stamped(parse({"entry": "train.py"}))
    assert stamped(began) == began
    assert began.entry_digest == digest(b"print(1)\n")
    (folder / "train.py").write_text("print(2)\n")
    line = refused(lambda: stamped(began), "allowed: train.py", "entry")
    assert "job.name" in line


def test_all_replicas_agree_on_the_name_and_the_digest_and_not_on_the_folder(folder: Path) -> None:
    one = stamped(parse({"entry": "train.py"}))
    other = stamped(parse({"entry": str(folder / "train.py")}))
    assert agreed(one)[ENTRY] == f'"train.py {one.entry_digest}"'
    assert config_hash(one) == config_hash(other)
    assert config_hash(load_again(one, folder)) == config_hash(one)
    (folder / "train.py").write_text("print(2)\n")
    edited = stamped(parse({"entry": "train.py"}))
    assert difference(agreed(edited), agreed(one)) == (ENTRY, agreed(edited)[ENTRY], agreed(one)[ENTRY])
    more = stamped(parse({"entry": "train.py", "args": ["--fast"]}))
    assert difference(agreed(more), agreed(edited)) == ("args", '["--fast"]', "[]")


def load_again(config: Config, folder: Path) -> Config:
    (folder / "dumped.yaml").write_text(dump(config))
    return load(folder / "dumped.yaml")


def test_the_built_in_trainer_has_no_digest() -> None:
    assert stamped(Config()) == Config()
    assert not {ENTRY, "args"} & agreed(Config()).keys()


def test_paths_stay_when_the_script_changes_the_folder(folder: Path) -> None:
    config = stamped(
        parse({"entry": "train.py", "checkpoint": {"dir": "kept", "every": 1}, "job": {"runs_dir": "r"}})
    )
    there = anchored(config)
    assert (there.checkpoint.dir, there.job.runs_dir) == (str(folder / "kept"), str(folder / "r"))
    assert there.checkpoint.key is None
    assert agreed(there) == agreed(config)

import fcntl
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ft_hsdp.errors import ConfigError, Retryable
from ft_hsdp.train import tokens
from ft_hsdp.train.tokens import SEPARATOR, VOCABULARY, Tokens, prepare
from tests.support.refused import refused

MIB = 2**20


def read(path: Path | str, tmp_path: Path, max_bytes: int = MIB) -> list[int]:
    return list(Tokens.open(prepare(str(path), "byte", max_bytes, tmp_path / "cache")).array.tolist())


def test_a_file_is_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"h\xc3\xa9\x00\xff")
    assert read(tmp_path / "a.txt", tmp_path) == [104, 0xC3, 0xA9, 0, 255]
    assert max(255, SEPARATOR) < VOCABULARY["byte"]


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    (folder / "b").mkdir(parents=True)
    (folder / "c.md").write_text("3")
    (folder / "b" / "x.py").write_text("2")
    (folder / "a.txt").write_text("1")
    (folder / "empty").write_text("")
    (folder / ".hidden").write_text("no")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "x").write_text("no")
    (folder / "gone").symlink_to("nowhere")
    os.mkfifo(folder / "pipe")
    assert read(folder, tmp_path) == [ord("1"), SEPARATOR, ord("2"), SEPARATOR, ord("3")]


def test_each_line_of_jsonl_is_a_document(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "ab", "id": 1}), "", json.dumps({"text": ""}), json.dumps({"text": "c"})]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert read(tmp_path / "a.jsonl", tmp_path) == [97, 98, SEPARATOR, 99]


@pytest.mark.parametrize("line", ["{", '{"txt": "a"}', '{"text": 3}', "[1]", "3", '{"text": "\\ud800"}'])
def test_a_bad_line_of_jsonl_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' + line + "\n")
    refused(lambda: read(tmp_path / "a.jsonl", tmp_path), r"^data.path: .*line 2 \(a.jsonl\)")
    assert [p.suffix for p in (tmp_path / "cache").iterdir()] == [".lock"]


def test_parquet_without_pyarrow_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    refused(lambda: read(tmp_path / "a.parquet", tmp_path), r"^data.path: .*pip install pyarrow")


def test_parquet_is_its_column_text(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is optional")
    arrow: Any = pytest.importorskip("pyarrow")
    parquet.write_table(arrow.table({"text": ["ab", None, "c"], "n": [1, 2, 3]}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", tmp_path) == [97, 98, SEPARATOR, 99]
    parquet.write_table(arrow.table({"other": ["ab"]}), tmp_path / "b.parquet")
    (tmp_path / "c.parquet").write_bytes(b"PAR1")
    for bad in ("b.parquet", "c.parquet"):
        refused(lambda bad=bad: read(tmp_path / bad, tmp_path), 'column "text"')


def test_text_beyond_max_bytes_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    for name in "abc":
        (tmp_path / "t" / name).write_text(name * 4)
    assert read(tmp_path / "t", tmp_path, max_bytes=6) == [97] * 4 + [SEPARATOR] + [98] * 2
    assert read(tmp_path / "t", tmp_path, max_bytes=4) == [97] * 4


def test_the_library_is_python_sources_without_its_tests(tmp_path: Path) -> None:
    root, files = tokens._listing("stdlib")
    names = [name for name, _, _ in files]
    assert root.is_dir()
    assert "json/decoder.py" in names
    assert "argparse.py" in names
    assert all(name.endswith(".py") for name in names)
    assert not [name for name in names if "site-packages" in name or "/test/" in f"/{name}"]
    text = bytes(t for t in read("stdlib", tmp_path, max_bytes=2000) if t != SEPARATOR)
    assert text.isascii()
    assert len(text) == 2000


def test_what_is_missing_or_empty_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    (tmp_path / "blank.jsonl").write_text("\n\n")
    (tmp_path / "folder").mkdir()
    for name, reason in {
        "nowhere": "No such file",
        "empty": "there is none",
        "blank.jsonl": "there is none",
        "folder": "there is none",
        "empty/below": "Not a directory",
        "nul\0": "null",
    }.items():
        with pytest.raises(ConfigError, match=rf"^data\.path: got .*{reason}") as caught:
            read(tmp_path / name, tmp_path)
        assert len(str(caught.value).splitlines()) == 1
    refused(lambda: prepare("stdlib", "bpe", MIB, tmp_path), r"^data\.tokenizer: got 'bpe'; allowed: byte")


def test_the_work_is_done_once_and_again_when_the_text_changes(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one")
    os.utime(file, ns=(1, 1))
    first = prepare(str(file), "byte", MIB, tmp_path / "cache")
    written = first.stat()
    assert prepare(str(file), "byte", MIB, tmp_path / "cache") == first
    assert first.stat().st_ino == written.st_ino, "another file would be renamed to its name"
    assert prepare(str(file), "byte", 2, tmp_path / "cache") != first
    file.write_text("two")
    os.utime(file, ns=(2, 2))
    assert bytes(read(file, tmp_path)) == b"two"
    assert bytes(Tokens.open(first).array.astype(np.uint8)) == b"one"


def test_the_wait_for_another_process_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("text")
    ready = prepare(str(tmp_path / "a.txt"), "byte", MIB, tmp_path / "cache")
    ready.unlink()
    monkeypatch.setattr(tokens, "_PREPARE_S", 0.1)
    with ready.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(Retryable, match="another process has been preparing"):
            read(tmp_path / "a.txt", tmp_path)
    assert bytes(read(tmp_path / "a.txt", tmp_path)) == b"text"


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "cache").write_text("a file stands where the folder should be")
    with pytest.raises(Retryable, match=f"cannot write tokens to {tmp_path / 'cache'}"):
        read(tmp_path / "a.txt", tmp_path)


def test_a_break_leaves_no_half_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text" * 50_000)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))  # as if the disk were full
    try:
        with pytest.raises(Retryable, match="cannot write tokens"):
            read(tmp_path / "a.txt", tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [p.suffix for p in (tmp_path / "cache").iterdir()] == [".lock"]

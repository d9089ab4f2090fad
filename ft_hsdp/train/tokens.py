"""Tokens: text is turned into a file of tokens once, which is then memory-mapped. Needs no torch."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import stat
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ft_hsdp.config.training import VOCABULARY
from ft_hsdp.errors import ConfigError, Retryable
from ft_hsdp.jsonl import open_to_append

SEPARATOR = 256
"""The token between two documents."""

_FORMAT = 1  # part of the key: raise it when the same text gives other tokens
_DTYPE = np.dtype("<u2")
_PREPARE_S = 600.0  # longest wait for another process that prepares the same file
_NOT_TEXT = {"__pycache__"}
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


class Tokens:
    def __init__(self, array: NDArray[np.uint16]) -> None:
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    @classmethod
    def open(cls, path: Path) -> Tokens:
        return cls(np.memmap(path, dtype=_DTYPE, mode="r"))


def prepare(path: str, tokenizer: str, max_bytes: int, cache: Path) -> Path:
    """Return the token file of a text; it is made once, and all processes that ask share it.

    Blocks while the file is made, here or by another process.

    Args:
        path: "stdlib", a file, or a folder, which is read recursively in the order of the names. `.jsonl` has a
        field
            "text" in each line, `.parquet` a column "text"; any other file is one document of bytes.

    Raises:
        ConfigError: On data.path: there is no usable text.
        Retryable: Another process holds the lock for too long, or the cache cannot be written.
    """
    if tokenizer not in VOCABULARY:
        raise ConfigError("data.tokenizer", tokenizer, ", ".join(VOCABULARY))
    root, files = _listing(path)
    ready = cache / f"tokens-{_key(root, files, tokenizer, max_bytes)}.bin"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if not ready.exists():
            with open_to_append(ready.with_suffix(".lock")) as lock:
                _lock(lock.fileno(), ready)
                if not ready.exists():
                    _write(path, root, [name for name, _, _ in files], max_bytes, ready)
    except OSError as error:
        raise Retryable(f"cannot write tokens to {cache}: {error}") from error
    return ready


@contextlib.contextmanager
def naming(key: str) -> Iterator[None]:
    """Have an error on a text name ``key``."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(key, error.value, error.allowed) from None


def count(path: str, tokenizer: str, max_bytes: int, enough: int) -> int:
    """Return how many tokens `prepare` would make, without making them; counts no further than ``enough``.

    Raises:
        ConfigError: As `prepare` does.
    """
    if tokenizer not in VOCABULARY:
        raise ConfigError("data.tokenizer", tokenizer, ", ".join(VOCABULARY))
    root, files = _listing(path)
    tokens, left = 0, max_bytes
    for length in _lengths(path, root, files):
        if left == 0 or tokens >= enough:
            break
        if length:
            tokens += min(length, left) + (1 if left < max_bytes else 0)
            left -= min(length, left)
    return tokens


def _lengths(path: str, root: Path, files: list[tuple[str, int, int]]) -> Iterator[int]:
    for name, size, _ in files:
        if Path(name).suffix.lower() in _READERS:
            yield from map(len, _documents(path, root, [name]))
        elif os.access(root / name, os.R_OK):
            yield size
        else:
            raise ConfigError("data.path", path, f"readable files ({name}: {os.strerror(errno.EACCES)})")


def _listing(path: str) -> tuple[Path, list[tuple[str, int, int]]]:
    """The folder, and (relative name, size, mtime in ns) of each file in it that counts, sorted."""
    try:
        if path == "stdlib":
            root = Path(sysconfig.get_paths()["stdlib"])
            names = [n for n in _walk(root, _NOT_TEXT | _NOT_LIBRARY) if n.endswith(".py")]
        else:
            given = Path(path).expanduser().resolve(strict=True)
            root = given if given.is_dir() else given.parent
            names = list(_walk(root, _NOT_TEXT)) if given.is_dir() else [given.name]
        files = [
            (name, info.st_size, info.st_mtime_ns)
            for name, info in ((name, (root / name).stat()) for name in sorted(names))
            if stat.S_ISREG(info.st_mode) and info.st_size > 0
        ]
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError("data.path", path, f"stdlib, or a file or folder that can be read ({reason})") from None
    if not files:
        raise ConfigError("data.path", path, "a file or folder with text in it (there is none)")
    return root, files


def _walk(root: Path, skipped: set[str]) -> Iterator[str]:
    def fail(error: OSError) -> None:
        raise error

    for folder, below, names in os.walk(root, onerror=fail):
        below[:] = sorted(n for n in below if not n.startswith(".") and n not in skipped)
        for name in names:
            full = Path(folder) / name
            if not name.startswith(".") and full.exists():
                yield full.relative_to(root).as_posix()


def _key(root: Path, files: list[tuple[str, int, int]], tokenizer: str, max_bytes: int) -> str:
    picture = json.dumps([_FORMAT, str(root), files, tokenizer, max_bytes]).encode()
    return hashlib.blake2b(picture, digest_size=12).hexdigest()


def _lock(descriptor: int, ready: Path) -> None:
    deadline = time.monotonic() + _PREPARE_S
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise Retryable(f"another process has been preparing {ready} for {_PREPARE_S:.0f} s") from None
            time.sleep(0.05)


def _write(path: str, root: Path, names: list[str], max_bytes: int, ready: Path) -> None:
    """Write the tokens beside `ready`, then rename: it is whole or not there."""
    part = ready.with_suffix(f".{os.getpid()}.part")
    left = max_bytes
    try:
        with part.open("wb") as out:
            for document in _documents(path, root, names):
                text = document[:left]
                if not text:
                    continue
                if left < max_bytes:
                    out.write(np.array([SEPARATOR], dtype=_DTYPE).tobytes())
                out.write(np.frombuffer(text, dtype=np.uint8).astype(_DTYPE).tobytes())
                left -= len(text)
                if left == 0:
                    break
            out.flush()
            os.fsync(out.fileno())
        if left == max_bytes:
            raise ConfigError("data.path", path, "a file or folder with text in it (there is none)")
        part.rename(ready)
    finally:
        part.unlink(missing_ok=True)


def _documents(path: str, root: Path, names: list[str]) -> Iterator[bytes]:
    for name in names:
        read = _READERS.get(Path(name).suffix.lower(), _plain)
        try:
            yield from read(root / name)
        except OSError as error:
            raise ConfigError("data.path", path, f"readable files ({name}: {error.strerror})") from None
        except _Malformed as error:
            raise ConfigError("data.path", path, f"{error} ({name})") from None


class _Malformed(Exception):
    """A file that does not hold what its name says; the text says what it should hold."""


def _plain(file: Path) -> Iterator[bytes]:
    yield file.read_bytes()


def _json_lines(file: Path) -> Iterator[bytes]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)["text"].encode()
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                raise _Malformed(
                    f'JSONL whose every line is an object with a text "text": see line {number}'
                ) from None
            yield text


def _parquet(file: Path) -> Iterator[bytes]:
    try:
        import pyarrow.parquet  # an optional dependency
    except ImportError:
        raise _Malformed("text or JSONL; Parquet needs pyarrow: pip install pyarrow") from None
    try:
        table: Any = pyarrow.parquet.ParquetFile(file)
        for rows in table.iter_batches(columns=["text"]):
            for value in rows.column("text").to_pylist():
                if value is not None:
                    yield value.encode()
    except (pyarrow.ArrowException, KeyError, AttributeError):
        raise _Malformed('Parquet with a column "text" of strings') from None


_READERS: dict[str, Callable[[Path], Iterator[bytes]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".parquet": _parquet,
}

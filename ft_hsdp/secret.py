"""A job's tokens, and the operator's key, which signs checkpoints and outlives runs.

They stand in files that only their owner can read, or in the environment. The lighthouse, the host agents and the
commands know the job's token. The ranks work with the *worker's token*, which follows from it.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import secrets
import stat
from pathlib import Path

from ft_hsdp.errors import ConfigError
from ft_hsdp.jsonl import read_regular
from ft_hsdp.mounts import link_new

_TOKEN = re.compile(r"[!-~]{8,256}")
TOKEN_VARIABLE = "FT_HSDP_TOKEN"  # noqa: S105 - the name of a variable
KEY_VARIABLE = "FT_HSDP_CHECKPOINT_KEY"
RUN_KEY = "checkpoint_key"
_KEY = "checkpoint.key"
_ALLOWED = "a file of one token, or of two: the current one and another that is accepted, too"


def read(file: Path, variable: str) -> tuple[str, ...]:
    """Return the tokens in `file`, the current one first; else the one in the environment's `variable`; else none.

    Raises:
        ConfigError: what is there cannot be used. The line names the file and never shows its content.
    """
    try:
        lines = tuple(read_regular(file).decode("ascii").split())
    except FileNotFoundError:
        return given(variable)
    except UnicodeError:
        raise ConfigError(file.name, str(file), f"{_ALLOWED} (it is not ASCII text)") from None
    except OSError as error:
        raise ConfigError(file.name, str(file), f"{_ALLOWED} ({error.strerror})") from None
    if not lines:
        raise ConfigError(file.name, str(file), f"{_ALLOWED} (it is empty)")
    if len(lines) > 2 or not all(map(_TOKEN.fullmatch, lines)):
        raise ConfigError(file.name, str(file), f"{_ALLOWED}, each of 8 to 256 visible characters")
    return lines


def given(variable: str) -> tuple[str, ...]:
    """Return the tokens in the environment's `variable`, the current one first; none if it is not set.

    Raises:
        ConfigError: it is set and blank: a secret is missing where one is meant to be.
    """
    tokens = tuple(os.environ.get(variable, "").split()[:2])
    if not tokens and variable in os.environ:
        raise ConfigError(variable, os.environ[variable], "a token, or no such variable (it is set and blank)")
    return tokens


def current(file: Path) -> str:
    """Return the token in `file` that is to be used.

    Raises:
        OSError: the file cannot be read.
        ConfigError: it has no token.
    """
    lines = read_regular(file).decode("ascii", "replace").split()
    if not lines:
        raise ConfigError(file.name, str(file), f"{_ALLOWED} (it is empty)")
    return lines[0]


def worker_token(token: str) -> str:
    """Return the worker's token of a job, 64 hex digits: the ranks', from which the job's token cannot be found.

    Args:
        token: The job's; "" (none) has none.
    """
    return hmac.digest(token.encode(), b"ft_hsdp worker", "sha256").hex() if token else ""


def write_private(path: Path, text: str) -> None:
    """Put a file with `text` at `path` that only its owner can read.

    It is made under a fresh name and renamed: what stood there, a link included, is replaced and never written
    to.

    Raises:
        OSError: it cannot be written.
    """
    part = _fresh(path, text)
    try:
        part.replace(path)
    except OSError:
        part.unlink()
        raise


def make_checkpoint_key(file: str | None, folder: Path | None = None) -> bytes:
    """Return the key that signs checkpoints, as `checkpoint_key`; a file that is missing is made.

    Args:
        file: `checkpoint.key`.
        folder: Where the job's checkpoints are. If there are any, a key that is missing is lost, and none is made.

    Raises:
        ConfigError: it cannot be made, was lost, or has no key.
    """
    path = Path(file) if file is not None else key_file()
    signed = None if folder is None else next(folder.glob("step-*-epoch-*/manifest.json"), None)
    if KEY_VARIABLE not in os.environ and not os.path.lexists(path):
        if signed is not None:
            allowed = f"the key that signed {signed.parent} (it is missing): put it back, or set {KEY_VARIABLE}"
            raise ConfigError(_KEY, str(path), f"{allowed}; a new key only with --checkpoint.trust=true, for once")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            part = _fresh(path, secrets.token_hex(32) + "\n")
            with contextlib.suppress(FileExistsError):  # another run made it at this moment
                link_new(part, path)
            part.unlink()
        except OSError as error:
            allowed = f"a file that can be read or made ({error.strerror}); {KEY_VARIABLE} replaces it"
            raise ConfigError(_KEY, str(path), allowed) from None
    return checkpoint_key(file)


def checkpoint_key(file: str | None) -> bytes:
    """Return the key that signs checkpoints: from the environment, else from `file`, else the user's state folder.

    Raises:
        ConfigError: there is none, or what is there is no key.
    """
    tokens = given(KEY_VARIABLE)
    if tokens:
        if len(tokens) > 1 or not _TOKEN.fullmatch(tokens[0]):
            raise ConfigError(KEY_VARIABLE, "...", "8 to 256 visible characters")
        return tokens[0].encode()
    path = Path(file) if file is not None else key_file()
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o007:
            raise ConfigError(_KEY, str(path), "a file that others cannot read (chmod 600)")
        text = read_regular(path).decode("ascii", "replace").strip()
    except OSError as error:
        allowed = f"a file that can be read or made ({error.strerror}); {KEY_VARIABLE} replaces it"
        raise ConfigError(_KEY, str(path), allowed) from None
    if not _TOKEN.fullmatch(text):
        raise ConfigError(_KEY, str(path), "a file of one line, of 8 to 256 visible characters")
    return text.encode()


def run_key(run: Path, file: str | None) -> bytes:
    """Return the key that signs the checkpoints of the job in `run`: the copy there, else the user's.

    Raises:
        ConfigError: there is none.
    """
    try:
        return current(run / RUN_KEY).encode()
    except OSError:
        return checkpoint_key(file)


def key_file() -> Path:
    """Return where this user's checkpoint key is if `checkpoint.key` is not given.

    Raises:
        ConfigError: this user has no home.
    """
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    if state.startswith("~"):
        allowed = f"a file, or {KEY_VARIABLE}: HOME is not set, and this user has no home"
        raise ConfigError("checkpoint.key", None, allowed)
    return Path(state) / "ft_hsdp" / _KEY


def _fresh(path: Path, text: str) -> Path:
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    return part

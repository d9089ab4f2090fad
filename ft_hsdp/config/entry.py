"""What a rank runs instead of the built-in trainer: the file behind `entry`, and its digest. Nothing is imported.

All replicas must run the same file: `stamped` puts its digest into the configuration when a process of the job
starts, and `loader.agreed` has it from there. The modules that the file imports are not covered.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from ft_hsdp.config.config import Config
from ft_hsdp.errors import ConfigError


def title(entry: str) -> str:
    """Return the name of an entry for people: a script without its folder, or module:function."""
    return entry if is_function(entry) else Path(entry).name


def is_function(entry: str) -> bool:
    """Return whether an entry is module:function, and not a script."""
    return not entry.endswith(".py")


def locate(entry: str) -> Path:
    """Return the file of an entry: the script, or the source of the module, which is not imported.

    A module is looked for in the working directory first, as `python -m` does.

    Raises:
        ConfigError: There is no such file or module.
    """
    if not is_function(entry):
        path = Path(entry)
        if not path.is_file():
            where = "" if path.is_absolute() else f" in {Path.cwd()}"
            why = "it is no file" if path.exists() else f"there is no such file{where}"
            raise ConfigError("entry", entry, f"a Python script; {why}")
        return path
    module = entry.partition(":")[0]
    places: Sequence[str] | None = [os.getcwd(), *sys.path]
    spec: ModuleSpec | None = None
    for part in module.split("."):
        if places is None:
            raise ConfigError("entry", entry, f"module:function; {part} is in no package")
        # By its last name, as if it were at the top: then no package above it has to be imported.
        spec = PathFinder.find_spec(part, places)
        if spec is None and part == module:
            spec = importlib.util.find_spec(module)  # an installation may have a finder of its own
        if spec is None:
            raise ConfigError(
                "entry", entry, f"module:function; there is no module {part} in {Path.cwd()} or installed"
            )
        places = spec.submodule_search_locations
    assert spec is not None
    if spec.origin is None or not os.path.isfile(spec.origin):
        raise ConfigError("entry", entry, f"module:function; {module} has no file")
    return Path(spec.origin)


def read(entry: str) -> bytes:
    """Return the content of the file of an entry.

    Raises:
        ConfigError: There is no such file, or it cannot be read.
    """
    path = locate(entry)
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError("entry", entry, f"a file that can be read ({error.strerror})") from None


def check_syntax(entry: str, content: bytes) -> None:
    """Compile the content of an entry's file.

    Raises:
        ConfigError: It is not Python.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # whoever runs the file hears of them
            compile(content, entry, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        where = f"line {error.lineno}: {error.msg}" if isinstance(error, SyntaxError) else str(error)
        raise ConfigError("entry", entry, f"Python without a syntax error ({where})") from None


def digest(content: bytes) -> str:
    """Return the digest of the content of an entry's file: 32 hex digits."""
    return hashlib.blake2b(content, digest_size=16, person=b"ft_hsdp.entry").hexdigest()


def stamped(config: Config) -> Config:
    """Return the configuration with the digest of its entry's file as it is now.

    Raises:
        ConfigError: The file cannot be read or is not Python, or the configuration has the digest of another one:
            the job began with that.
    """
    if config.entry is None:
        return config
    content = read(config.entry)
    found = digest(content)
    if config.entry_digest not in (None, found):
        began = f"{title(config.entry)} as it was when the job began (digest {config.entry_digest[:8]}"
        out = "put it back, or start another job: another job.name"
        raise ConfigError("entry", config.entry, f"{began}, not {found[:8]}): {out}")
    if locate(config.entry).suffix == ".py":
        check_syntax(config.entry, content)
    return config.model_copy(update={"entry_digest": found})


def anchored(config: Config) -> Config:
    """Return the configuration with absolute paths in place of those that a rank uses after its script has begun.

    The script may change the working directory. `agreed` is the same over both.
    """

    def absolute(path: str | None) -> str | None:
        return None if path is None else os.path.abspath(path)

    network, job, checkpoint = config.network, config.job, config.checkpoint
    files = ("tls_certificate", "tls_key", "tls_ca", "client_certificate", "client_key")
    changed = {
        "job": job.model_copy(update={"runs_dir": absolute(job.runs_dir)}),
        "network": network.model_copy(update={name: absolute(getattr(network, name)) for name in files}),
        "checkpoint": checkpoint.model_copy(
            update={"dir": absolute(checkpoint.dir), "key": absolute(checkpoint.key)}
        ),
    }
    return config.model_copy(update=changed)

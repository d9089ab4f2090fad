"""Finds the file system of a path in /proc, tries what it can do, and does without what does not matter.

Object stores and some FUSE mounts have no locks, no hard links, or folders that cannot be fsynced.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from ft_hsdp.errors import ConfigError

MOUNTS = Path("/proc/self/mountinfo")
NETWORK = {
    *("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "afs", "orangefs"),
    *("wekafs", "9p", "virtiofs", "pvfs2", "panfs"),
}
SOCKETS_IN = 107 - len("/pymp-12345678/listener-12345678")  # bytes of a folder's name, at most
LOCKLESS = NETWORK - {"9p", "virtiofs"}  # these mostly connect a virtual machine with its host
"""Where a lock on one machine may mean nothing on another: no place for a database."""


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of /proc/self/mountinfo."""

    place: Path  # where it is mounted
    kind: str  # type of the file system
    options: tuple[str, ...]  # of the mount

    @property
    def network(self) -> bool:
        """Whether other machines may see it too. FUSE mostly means so, except for overlays."""
        return self.kind in NETWORK or (self.kind.startswith("fuse.") and "overlay" not in self.kind)


def mount_of(path: Path, mounts: Path = MOUNTS) -> Mount | None:
    """Return the file system on which `path` lies, or would lie; None if that is not known."""
    there = existing(path)
    try:
        found = [_parsed(line) for line in mounts.read_bytes().splitlines()]
    except OSError:
        return None
    above = [mount for mount in found if mount.place in (there, *there.parents)]
    newest_first = reversed(above)  # of two at one place the last one hides the others
    return max(newest_first, key=lambda mount: len(mount.place.parts), default=None)


def existing(path: Path) -> Path:
    """Return `path`, or the nearest folder above it that exists."""
    path = path.resolve()
    return next(each for each in (path, *path.parents) if each.exists())


def _parsed(line: bytes) -> Mount:
    before, _, after = line.partition(b" - ")
    fields = before.split(b" ")
    place = fields[4].decode("unicode_escape").encode("latin-1")  # a blank is \\040, and names have any bytes
    kind, options = map(os.fsdecode, (after.split(b" ")[0], fields[5]))
    return Mount(Path(os.fsdecode(place)), kind, tuple(options.split(",")))


class Ability(StrEnum):
    """What a file system may lack, and what is lost without it."""

    LOCKS = "locks"  # the store of a lighthouse; a claim and a draft are judged by their age
    SYNC = "fsync of folders"  # what was renamed last, if the file server crashes
    LINKS = "hard links"  # nothing: a new file is there for a moment before its content
    RENAME = "rename of folders"  # a run, and a checkpoint, appear whole or not at all


UNABLE = frozenset(
    {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EPERM, errno.ENOLCK, errno.EXDEV, errno.EMLINK}
)
"""Errors of a file system that cannot do what it was asked for, at no time."""


def lacks(folder: Path) -> tuple[Ability, ...]:
    """Return what the file system of `folder` cannot do: all is tried in a folder there, which is removed.

    Raises:
        OSError: nothing can be made there now.
    """
    missing = []
    with tempfile.TemporaryDirectory(prefix=".try-", dir=folder, ignore_cleanup_errors=True) as made:
        for ability, attempt in _ATTEMPTS.items():
            place = Path(made) / ability.name
            place.mkdir()
            (place / "file").touch()
            try:
                attempt(place)
            except OSError as error:
                if error.errno not in UNABLE:
                    raise
                missing.append(ability)
    return tuple(missing)


def need(folder: Path, key: str, *abilities: Ability) -> tuple[Ability, ...]:
    """Check that a file system can do what a job asks of the folder that `key` names, and return what it lacks.

    Raises:
        ConfigError: it cannot.
        OSError: nothing can be made there now.
    """
    missing = lacks(existing(folder))
    if absent := [each for each in abilities if each in missing]:
        mount = mount_of(folder)
        kind = "its file system" if mount is None else mount.kind
        raise ConfigError(key, str(folder), f"a folder with {' and '.join(abilities)} ({kind} has no {absent[0]})")
    return missing


def need_store(folder: Path) -> None:
    """Check that a lighthouse without etcd can keep its store in a folder.

    Raises:
        ConfigError: locks may fail there, and two lighthouses on two machines could both have the store.
    """
    mount = mount_of(folder)
    if mount is not None and mount.kind.removeprefix("fuse.") in LOCKLESS:
        where = f"locks may fail on {mount.kind} at {mount.place}"
        allowed = f"the URLs of an etcd, such as [http://HOST:2379], or a job.runs_dir on a local disk ({where})"
        raise ConfigError("lighthouse.etcd", [], allowed)


def _lock(folder: Path) -> None:
    with (folder / "file").open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(file, fcntl.LOCK_UN)
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as SQLite does


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _link(folder: Path) -> None:
    os.link(folder / "file", folder / "another")


def _rename(folder: Path) -> None:
    folder.rename(folder.with_name("renamed"))


_ATTEMPTS: Mapping[Ability, Callable[[Path], None]] = {
    Ability.LOCKS: _lock,
    Ability.SYNC: _sync,
    Ability.LINKS: _link,
    Ability.RENAME: _rename,
}


def sync_names(folder: Path) -> None:
    """Make durable which names a folder has, where that can be asked for. Raises OSError."""
    try:
        _sync(folder)
    except OSError as error:
        if error.errno not in UNABLE:
            raise


def link_new(part: Path, path: Path) -> None:
    """Give the file `part` a second name, or `path` its content where there are no links.

    Raises:
        FileExistsError: there is something at `path`.
        OSError: it cannot be written.
    """
    try:
        os.link(part, path)
        return
    except OSError as error:
        if error.errno not in UNABLE:
            raise
    mode = stat.S_IMODE(part.stat().st_mode)
    data, new = part.read_bytes(), os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(new, "wb") as file:
            file.write(data)
    except OSError:
        path.unlink()
        raise


def too_long_for_sockets() -> str:
    """Return the folder for temporary files if sockets of multiprocessing in it get too long a name; else ""."""
    folder = tempfile.gettempdir()
    return folder if len(os.fsencode(folder)) > SOCKETS_IN else ""

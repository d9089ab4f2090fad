"""Finds the file system of a path in /proc."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
NETWORK = {
    *("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "afs", "orangefs"),
    *("wekafs", "9p", "virtiofs", "pvfs2", "panfs"),
}
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
        found = [_parsed(line) for line in mounts.read_text().splitlines()]
    except OSError:
        return None
    above = [mount for mount in found if mount.place in (there, *there.parents)]
    newest_first = reversed(above)  # of two at one place the last one hides the others
    return max(newest_first, key=lambda mount: len(mount.place.parts), default=None)


def existing(path: Path) -> Path:
    """Return `path`, or the nearest folder above it that exists."""
    path = path.resolve()
    return next(each for each in (path, *path.parents) if each.exists())


def _parsed(line: str) -> Mount:
    before, _, after = line.partition(" - ")
    fields = before.split()
    place = fields[4].encode("latin-1", "backslashreplace").decode("unicode_escape")  # a blank is \\040
    return Mount(Path(place), after.split()[0], tuple(fields[5].split(",")))

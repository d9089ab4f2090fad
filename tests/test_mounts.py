"""What a file system cannot do is found where files will be used, and is no error where it does not matter."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ft_hsdp import mounts, secret
from ft_hsdp.claim import Claim, FolderOwner
from ft_hsdp.config import parse
from ft_hsdp.errors import ConfigError
from ft_hsdp.fault_injection import FaultOrder
from ft_hsdp.launch.doctor import storage
from ft_hsdp.launch.doctor.result import Bad, Subject
from ft_hsdp.launch.run.directory import make_run, run_of
from ft_hsdp.mounts import Ability
from tests.support.os_faults import ME, enforcing, poor
from tests.support.refused import refused

LOCKS, SYNC, LINKS, RENAME = Ability


@pytest.mark.parametrize("lacking", [(), (LOCKS,), (SYNC, LINKS), (RENAME,), tuple(Ability)])
def test_what_lacks_is_found_and_nothing_is_left(tmp_path: Path, lacking: tuple[Ability, ...]) -> None:
    with poor(tmp_path, *lacking):
        assert mounts.lacks(tmp_path) == lacking
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("lacking", "disk", "checkpoint"),
    [
        ((LOCKS,), "job.runs_dir: .* with locks and .* has no locks", "goes without locks"),
        ((RENAME,), "job.runs_dir: .* has no rename", "checkpoint.dir: .* has no rename"),
        ((SYNC, LINKS), "free", "goes without fsync of folders and hard links"),
        ((), "free", r"\)$"),
    ],
)
def test_the_start_and_doctor_say_what_matters(
    tmp_path: Path, lacking: tuple[Ability, ...], disk: str, checkpoint: str
) -> None:
    folders = {"job": {"name": "j", "runs_dir": f"{tmp_path}/runs"}, "checkpoint": {"dir": f"{tmp_path}/kept"}}
    config = parse(folders)
    rows = []
    with poor(tmp_path, *lacking):
        for check in (storage.disk, storage.checkpoint):
            try:
                rows.append(check(Subject(config)))
            except Bad as bad:
                rows.append(str(bad))
        if disk == "free":
            make_run(run_of(config), config).release()
        else:
            refused(lambda: make_run(run_of(config), config), disk)
            assert list((tmp_path / "runs").iterdir()) == []
    assert re.search(disk, rows[0])
    assert re.search(checkpoint, rows[1])


def test_a_new_file_replaces_nothing_with_links_and_without(tmp_path: Path) -> None:
    for number, lacking in enumerate([(), (LINKS,)]):
        part, made = tmp_path / "part", tmp_path / str(number)
        part.write_text("secret")
        part.chmod(0o600)
        with poor(tmp_path, *lacking):
            mounts.link_new(part, made)
            with pytest.raises(FileExistsError):
                mounts.link_new(part, made)
        assert (made.read_text(), made.stat().st_mode & 0o777) == ("secret", 0o600)


def test_a_claim_and_a_key_need_neither_links_nor_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(secret.KEY_VARIABLE, raising=False)
    with poor(tmp_path, *Ability):
        one = Claim(tmp_path, FolderOwner.of("one", "a" * 64)).take("checkpoint.dir", str(tmp_path), "a free one")
        with pytest.raises(ConfigError, match="job one has it"):
            Claim(tmp_path, FolderOwner.of("two", "b" * 64)).take("checkpoint.dir", str(tmp_path), "a free one")
        one.release()
        key = secret.make_checkpoint_key(str(tmp_path / "key"))
        assert secret.make_checkpoint_key(str(tmp_path / "key")) == key


def test_an_error_of_the_disk_is_no_lack(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        mounts.sync_names(tmp_path / "gone")
    with poor(tmp_path, SYNC), enforcing(tmp_path) as put:
        mounts.sync_names(tmp_path)
        put(FaultOrder("disk_full", ME))
        with pytest.raises(OSError, match="No space left"):
            mounts.lacks(tmp_path)

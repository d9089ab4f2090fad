from __future__ import annotations

import fcntl
import os
import random
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from ft_hsdp.config import Config
from ft_hsdp.config.running import CheckpointConfig
from ft_hsdp.core.ledger import Ledger
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import ConfigError
from ft_hsdp.mounts import Ability
from ft_hsdp.state.checkpoint import catalog, checkpoint_manifest, dcp, drafts
from ft_hsdp.state.checkpoint.catalog import JobData, differing_data
from ft_hsdp.state.checkpoint.checkpoint_manifest import (
    FORMAT,
    CheckpointManifest,
    File,
    Stored,
    TensorPiece,
    Unauthentic,
    Unusable,
)
from ft_hsdp.state.transfer import shard_manifest
from ft_hsdp.state.transfer.shard_manifest import Layout, PackedTensor
from ft_hsdp.train.state.checkpointing import check_manifests
from tests.support.os_faults import poor
from tests.support.refused import refused
from tests.support.waiting import until

FILES = {".metadata": b"pickle" * 40, "__0_0.distcp": bytes(range(256)) * 20, "__1_0.distcp": b""}
KEY = b"operator's key"
HYPER = ({"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-08, "foreach": None, "maximize": False},)


def manifest(
    step: int, epoch: int, incarnation: str = "0-a-0", files: dict[str, File] | None = None
) -> CheckpointManifest:
    tensors = (Stored("param", "w", "float32", (3, 4)), Stored("optim", "w.step", "float32", ()))
    state = StateId(epoch, step, "ab" * 16)
    return CheckpointManifest(
        FORMAT, state, incarnation, 3, 2, "hash", {"a": 1.5}, 2, Ledger((4, 5)), HYPER, tensors, files or {}
    )


def checkpoint(folder: Path, step: int, epoch: int = 1, incarnation: str = "0-a-0") -> Path:
    """A valid one with files of no sense."""
    path = folder / checkpoint_manifest.name_of(StateId(epoch, step, "ab" * 16), incarnation)
    path.mkdir()
    for name, data in FILES.items():
        (path / name).write_bytes(data)
    files = {name: checkpoint_manifest.describe(path / name) for name in FILES}
    (path / "manifest.json").write_bytes(
        checkpoint_manifest.encode(checkpoint_manifest.signed(manifest(step, epoch, incarnation, files), KEY))
    )
    return path


def reason(folder: Path) -> str:
    found = catalog.newest(folder, KEY)
    assert found.checkpoint is None
    assert len(found.skipped) == 1
    return found.skipped[0].reason


def test_a_manifest_comes_back_as_it_was(tmp_path) -> None:
    path = checkpoint(tmp_path, 4, 2)
    found = catalog.newest(tmp_path, KEY)
    assert found.checkpoint is not None
    assert found.checkpoint.path == path
    got = found.checkpoint.manifest
    assert got == replace(manifest(4, 2, files=got.files), digest=got.digest, mac=got.mac)
    assert got.files["__0_0.distcp"].nbytes == 5120


def test_the_newest_is_the_largest_epoch_and_step_and_never_the_youngest(tmp_path) -> None:
    for step, epoch in ((9, 1), (3, 2), (10, 1), (2, 2)):
        checkpoint(tmp_path, step, epoch)
    found = [path.name for path in catalog.published(tmp_path)]
    assert found == [f"step-{s}-epoch-{e}-0-a-0" for s, e in ((3, 2), (2, 2), (10, 1), (9, 1))]
    newest = catalog.newest(tmp_path, KEY).checkpoint
    assert newest is not None
    assert newest.manifest.state.step == 3
    ninth = catalog.newest(tmp_path, KEY, step=9).checkpoint
    assert ninth is not None
    assert ninth.manifest.state.step == 9
    assert catalog.newest(tmp_path, KEY, step=1) == catalog.Found(None, ())


def test_a_checkpoint_is_missed_unless_it_or_a_newer_one_is_there_or_being_written(tmp_path: Path) -> None:
    assert drafts.missed(tmp_path / "none", 5)
    checkpoint(tmp_path, 4)
    name = checkpoint_manifest.name_of(StateId(1, 6, "ab" * 16), "0-a-0")
    draft = drafts.unfinished(tmp_path, name)
    draft.mkdir()
    with (draft / "manifest.json").open("wb") as file:
        assert drafts.missed(tmp_path, 5), "its writer is dead"
        fcntl.flock(file, fcntl.LOCK_EX)
        assert not drafts.missed(tmp_path, 5), "its writer lives"
        assert not drafts.missed(tmp_path, 6)
        assert drafts.missed(tmp_path, 7)
    assert not drafts.missed(tmp_path, 4)


def test_where_there_are_no_locks_a_living_writer_renews_its_draft(tmp_path: Path) -> None:
    draft = drafts.Draft(tmp_path, checkpoint_manifest.name_of(StateId(1, 6, "ab" * 16), "0-a-0"))
    with poor(tmp_path, Ability.LOCKS):
        draft.begin()
        os.utime(draft.path / "manifest.json", (1, 1))
        assert drafts.missed(tmp_path, 6), "it is old"
        until(lambda: not drafts.missed(tmp_path, 6), "it is renewed", 60.0)
        assert drafts.sweep(tmp_path) == []
        draft.discard()
        assert list(tmp_path.iterdir()) == []
        old = drafts.unfinished(tmp_path, draft.final.name)
        old.mkdir()
        (old / "manifest.json").touch()
        os.utime(old / "manifest.json", (1, 1))
        assert drafts.sweep(tmp_path) == [old.name], "nobody renews it"


def test_what_no_reader_would_accept_is_not_published(tmp_path: Path) -> None:
    older, name = checkpoint(tmp_path, 4), checkpoint_manifest.name_of(StateId(1, 5, "ab" * 16), "0-a-0")
    draft = drafts.Draft(tmp_path, name)
    draft.begin()
    (draft.path / ".metadata").touch()
    made = manifest(5, 1, files={".metadata": checkpoint_manifest.describe(draft.path / ".metadata")})
    size = len(checkpoint_manifest.encode(checkpoint_manifest.signed(made, KEY)))
    with mock.patch.object(checkpoint_manifest, "MAX_MANIFEST", size - 1), pytest.raises(Unusable):
        draft.publish(made, 1, KEY)
    assert catalog.published(tmp_path) == [older], "and the older one is kept"
    with mock.patch.object(checkpoint_manifest, "MAX_MANIFEST", size):
        assert draft.publish(made, 1, KEY) == {"removed": [older.name], "trouble": ""}
        draft.discard()
        assert catalog.manifest_of(tmp_path / name).state == made.state


def experts(count: int, ranks: int) -> Layout:
    """Of the first rank: each expert is cut over all ranks, and another tensor of it over thirteen."""
    tensors = [
        PackedTensor(f"layers.{n}.experts.up.weight", "param", "float32", shape, whole, 1 << 20 | n, 4096, "rows")
        for n in range(count)
        for shape, whole in (((8, 512), (8 * ranks, 512)), ((1, 2), (13, 2)))
    ]
    return Layout((*tensors, PackedTensor("step", "optim", "float32", (), (), 1 << 21, 4, "whole")), 1 << 22)


def test_how_long_a_manifest_will_be_is_known_before_anything_is_written() -> None:
    ranks, layout = 64, experts(20, 64)
    made = manifest(1, 1)
    pieces = [
        TensorPiece(n, (rank * t.shape[0], 0), t.shape, f"__{rank}_0.distcp", t.offset + 999 * n, t.nbytes + 400)
        for n, t in enumerate(layout.tensors[:-1])
        for rank in range(ranks if n % 2 == 0 else 13)
    ]
    pieces.append(TensorPiece(40, (), (), "__0_0.distcp", 1, 4))
    full = replace(made, tensors=dcp.stored(layout), pieces=tuple(pieces))
    nbytes = len(checkpoint_manifest.encode(full)) - len(checkpoint_manifest.encode(replace(made, tensors=())))
    assert 0.95 * nbytes < dcp.manifest_bytes(layout, ranks) < 1.05 * nbytes


def test_a_job_with_too_many_tensors_is_refused_at_its_start() -> None:
    layout, kept = experts(20, 64), CheckpointConfig(every=5)
    size = dcp.manifest_bytes(layout, 64)

    def check(checkpoints: CheckpointConfig) -> None:
        check_manifests(Config(checkpoint=checkpoints), layout, HYPER, 0, 64)

    with mock.patch.object(checkpoint_manifest, "MAX_MANIFEST", size):
        check(kept)
    with mock.patch.object(checkpoint_manifest, "MAX_MANIFEST", size - 1):
        refused(lambda: check(kept), r"checkpoint\.every: got 5")
        refused(lambda: check(CheckpointConfig(dir="/x")), r"checkpoint\.dir")
        check(CheckpointConfig())  # none is written, unless somebody asks for it
    with mock.patch.object(shard_manifest, "MAX_MANIFEST", 4096):
        refused(lambda: check(CheckpointConfig()), "job.shard: got '41 tensors'")


def test_every_flipped_bit_is_seen(tmp_path) -> None:
    path = checkpoint(tmp_path, 1)
    sample = random.Random(3)
    for file in (path / "manifest.json", path / ".metadata", path / "__0_0.distcp"):
        whole = file.read_bytes()
        bits = len(whole) * 8
        for bit in {0, bits - 1, *(sample.sample(range(bits), 120))}:
            changed = bytearray(whole)
            changed[bit // 8] ^= 1 << bit % 8
            file.write_bytes(changed)
            with pytest.raises(Unusable):
                catalog.verify(path, KEY)
        file.write_bytes(whole)
    catalog.verify(path, KEY)


def test_every_truncation_is_seen_and_every_byte_too_many(tmp_path) -> None:
    path = checkpoint(tmp_path, 1)
    for name in ("manifest.json", *FILES):
        whole = (path / name).read_bytes()
        for data in (whole[:-1], whole[: len(whole) // 2], b"", whole + b"\0", whole + b"\n"):
            if data == whole:
                continue
            (path / name).write_bytes(data)
            with pytest.raises(Unusable, match=name.replace(".", r"\.")):
                catalog.verify(path, KEY)
        (path / name).unlink()
        assert reason(tmp_path).startswith(f"{name}: No such file")
        os.mkfifo(path / name)
        assert reason(tmp_path).startswith(name)
        (path / name).unlink()
        (path / name).write_bytes(whole)
    catalog.verify(path, KEY)


def test_a_renamed_one_is_not_newer(tmp_path) -> None:
    checkpoint(tmp_path, 1).rename(tmp_path / "step-1-epoch-7-0-a-0")
    assert reason(tmp_path) == "manifest.json is of step-1-epoch-1-0-a-0"


META = {".metadata": File(1, "")}


@pytest.mark.parametrize(
    ("spoilt", "said"),
    [
        ({"format": 4}, "format 4, this version reads 5"),
        ({"files": {"../../x": File(1, "")}}, "files that no checkpoint has"),
        ({"files": {**META, "/etc/passwd": File(1, "")}}, "files that no checkpoint has"),
        ({"files": {"__0_0.distcp": File(1, "")}}, "files that no checkpoint has"),
        ({"files": META, "pieces": (TensorPiece(0, (0,), (1,), "../x", 0, 1),)}, "pieces of what it does not"),
        ({"files": META, "pieces": (TensorPiece(-1, (0,), (1,), ".metadata", 0, 1),)}, "pieces of what it does"),
        ({"files": META, "aliases": {"head": "embed"}}, "other names of what it does not have"),
        ({"accumulate": 0}, "ranks with 0 micro-batches each"),
        ({"accumulate": 2**63}, "ranks with 9223372036854775808 micro-batches"),
        ({"ranks": 0}, "has 0 ranks"),
    ],
)
def test_a_manifest_that_fits_its_digest_can_still_be_wrong(spoilt, said) -> None:
    with pytest.raises(Unusable, match=said):
        checkpoint_manifest.decode(checkpoint_manifest.encode(replace(manifest(1, 1), **spoilt)))


@pytest.mark.parametrize("data", [b"", b"[]", b"[" * 100_000, b"\xff\0", b'{"format": 5}'])
def test_junk_is_no_manifest(tmp_path, data) -> None:
    (checkpoint(tmp_path, 1) / "manifest.json").write_bytes(data)
    assert "manifest.json is not valid" in reason(tmp_path)


def test_an_incarnation_of_any_kind_makes_a_name(tmp_path) -> None:
    path = checkpoint(tmp_path, 1, incarnation="../1-ä b/c-" + "x" * 300)
    assert path.parent == tmp_path
    assert catalog.newest(tmp_path, KEY).checkpoint is not None


def test_the_newest_are_kept_and_what_is_torn_is_not_counted(tmp_path) -> None:
    for step in (1, 2, 3, 4):
        checkpoint(tmp_path, step)
    (tmp_path / "step-3-epoch-1-0-a-0" / "__0_0.distcp").write_bytes(b"short")
    assert drafts.retire(tmp_path, 2, "step-4-epoch-1-0-a-0") == ["step-3-epoch-1-0-a-0", "step-1-epoch-1-0-a-0"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-2-epoch-1-0-a-0", "step-4-epoch-1-0-a-0"]


def test_a_late_writer_takes_nothing_newer_away(tmp_path) -> None:
    checkpoint(tmp_path, 5, 1)
    for step in (3, 4):
        checkpoint(tmp_path, step, 2)
    assert drafts.retire(tmp_path, 1, "step-5-epoch-1-0-a-0") == []
    assert drafts.retire(tmp_path, 1, "step-8-epoch-1-0-a-0") == [], "a writer whose own is gone removes nothing"
    assert len(catalog.published(tmp_path)) == 3
    shutil.rmtree(tmp_path / "step-3-epoch-2-0-a-0")
    (tmp_path / "step-4-epoch-2-0-a-0" / "manifest.json").unlink()
    checkpoint(tmp_path, 1, 1)
    assert drafts.retire(tmp_path, 2, "step-5-epoch-1-0-a-0") == [], "a torn newer one does not count"
    assert len(catalog.published(tmp_path)) == 3


def test_rubbish_goes_and_checkpoints_stay(tmp_path) -> None:
    kept = checkpoint(tmp_path, 1)
    for name in (".writing-step-2-epoch-1-x", ".removing-step-0-epoch-1-x"):
        shutil.copytree(kept, tmp_path / name)
    (tmp_path / ".writing-step-3-epoch-1-x").mkdir()
    (tmp_path / "notes").mkdir()
    assert len(drafts.sweep(tmp_path)) == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes", kept.name]
    assert drafts.sweep(tmp_path / "none") == []
    refused(lambda: drafts.sweep(kept / "manifest.json"), r"checkpoint.dir: got .*Not a directory")


def test_what_was_signed_with_another_key_is_named_before_any_file_is_opened(tmp_path) -> None:
    path = checkpoint(tmp_path, 2)
    (path / ".metadata").unlink()
    for wrong in (b"another key", b""):
        with pytest.raises(Unauthentic, match="step-2-epoch-1-0-a-0"):
            catalog.newest(tmp_path, wrong)
    (path / "manifest.json").write_bytes(
        checkpoint_manifest.encode(manifest(2, 1, files={".metadata": File(1, "")}))
    )
    with pytest.raises(Unauthentic):
        catalog.newest(tmp_path, KEY)  # nobody signed it
    assert catalog.newest(tmp_path, None).skipped[0].reason.startswith(".metadata: ")


TEXT = {"kind": "Batches", "length": "77000", "text": "ab", "seed": "0", "batch_size": "4"}
SECTION = {"path": "text", "tokenizer": "byte", "max_bytes": 9}


def differing(facts: dict[str, str], other: bool, path: str = "text", known: dict[str, str] = TEXT) -> str:
    """How data with these facts, and this path, differ from those of a checkpoint."""
    written = replace(manifest(1, 1), data=known, config={"data": SECTION})

    def hash_with(config: Mapping[str, object]) -> str:
        return "hash" if config["data"] == SECTION else "another"

    here = "hash" if path == "text" else "moved"
    return differing_data(Path("kept"), written, here, JobData(facts, {**SECTION, "path": path}, other, hash_with))


@pytest.mark.parametrize(
    ("facts", "path", "said"),
    [
        ({**TEXT, "length": "77077", "text": "cd"}, "text", "data: length: got '77077'; allowed: 77000, as in"),
        ({**TEXT, "text": "cd"}, "text", "data: text: got 'cd'; allowed: ab"),
        ({**TEXT, "seed": "1"}, "text", "data: seed: got '1'; allowed: 0"),
        (TEXT, "moved", "data: data.path: got 'moved'; allowed: text"),
    ],
)
def test_a_resume_with_other_data_is_refused_by_name(facts, path, said) -> None:
    with pytest.raises(ConfigError) as refused:
        differing(facts, False, path)
    assert str(refused.value).startswith(said)
    assert "data.resume: other" in str(refused.value)


@pytest.mark.parametrize(
    ("facts", "path", "begins_anew"),
    [
        (TEXT, "text", False),
        ({**TEXT, "length": "77077"}, "text", True),
        ({**TEXT, "text": "cd"}, "moved", True),
        ({**TEXT, "seed": "1"}, "text", False),
        (TEXT, "moved", False),
        ({"kind": "stream"}, "moved", True),
        ({"kind": "stream"}, "text", False),
    ],
)
def test_other_data_are_read_from_their_beginning_if_they_may_be_others(facts, path, begins_anew) -> None:
    known = TEXT if "text" in facts else facts
    assert bool(differing(facts, True, path, known)) is begins_anew


@pytest.mark.parametrize("facts", [{}, {"text": "random"}, {"length": "77000"}, {**TEXT, "batch_size": "8"}])
def test_what_is_not_known_or_of_a_rank_alone_is_not_compared_at_a_resume(facts) -> None:
    assert differing(facts, False) == ""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ft_hsdp.launch.export import export
from ft_hsdp.mounts import Ability
from ft_hsdp.state.checkpoint import catalog, checkpoint_manifest, drafts
from tests.support.state.durable_ranks import KEY, Uneven, replica, two_layers


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Steps 1 and 2 of the same state, written by two ranks, and the state's digest. Not to be changed."""
    folder = tmp_path_factory.mktemp("two") / "deep" / "checkpoints"
    saved = replica(2, "save", folder, steps=[1, 2])
    assert saved[0] == saved[1]
    assert kinds(saved) == ["Published", "Published"]
    return folder, saved[0]["digest"]


@pytest.fixture
def copy(two: tuple[Path, str], tmp_path: Path) -> Path:
    """A copy of ``two`` to be spoilt."""
    return Path(shutil.copytree(two[0], tmp_path / "copy"))


def kinds(answers: list[Any]) -> list[str]:
    """The kinds of the outcomes; all ranks that answered say the same."""
    given = [each["outcomes"] for each in answers if "outcomes" in each]
    assert all(each == given[0] for each in given)
    return [each["kind"] for each in given[0]]


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_two_ranks_wrote_loads_bitwise_on_any_number(two, ranks) -> None:
    folder, digest = two
    answers = replica(ranks, "load", folder, {"seed": 7})
    for each in answers:
        assert each == {
            "digest": digest,
            "state": [1, 2, f"{2:032x}"],
            "ledger": [2, 4, 5],
            "hyper": True,
            "values": True,
            "skipped": [],
        }
    assert replica(1, "save", folder, {"seed": 7}, steps=[])[0]["digest"] != digest, "it was not there before"


def test_nothing_is_resumed_from_nothing(tmp_path) -> None:
    assert replica(2, "load", tmp_path / "none") == [{"none": True}] * 2
    (tmp_path / ".writing-step-9-epoch-9-x").mkdir()
    assert replica(1, "load", tmp_path) == [{"none": True}]
    (tmp_path / "file").write_text("")
    refused = replica(2, "load", tmp_path / "file")
    assert refused[0] == refused[1]
    assert "checkpoint.dir: got" in refused[0]["refused"]


def test_a_torn_one_is_passed_over_with_its_reason(two, copy) -> None:
    flip(next((copy / "step-2-epoch-1-0-a-0").glob("__1*")), 4000)
    answers = replica(2, "load", copy, {"seed": 7})
    assert [each["state"][1] for each in answers] == [1, 1]
    assert [each["digest"] for each in answers] == [two[1]] * 2
    ((name, why),) = answers[0]["skipped"]
    assert (name, why.split()[0]) == ("step-2-epoch-1-0-a-0", "__1_0.distcp")
    shutil.rmtree(copy / "step-1-epoch-1-0-a-0")
    for each in replica(2, "load", copy):
        assert each["refused"].startswith("checkpoint.dir: got ")
        assert "__1_0.distcp" in each["refused"]


def test_one_that_vanishes_between_check_and_use_is_passed_over(two, copy) -> None:
    answers = replica(2, "load_what_vanishes", copy, {"seed": 7})
    assert [each["digest"] for each in answers] == [two[1]] * 2
    assert [each["state"][1] for each in answers] == [1, 1]
    assert "No such file" in answers[0]["skipped"][0][1]


def test_a_pickle_in_a_checkpoint_is_never_run_by_whoever_changed_it(two, copy) -> None:
    """Hashes and digest are made anew: only the signature tells, and with trust nothing is unpickled either."""
    for path in copy.iterdir():
        bad = b"cos\nmkdir\n(V" + str(copy / "ran").encode() + b"\ntR."
        (path / ".metadata").write_bytes(bad)
        was = checkpoint_manifest.decode((path / "manifest.json").read_bytes())
        files = {**was.files, ".metadata": checkpoint_manifest.describe(path / ".metadata")}
        (path / "manifest.json").write_bytes(checkpoint_manifest.encode(dataclasses.replace(was, files=files)))
    refused = replica(2, "load", copy)
    assert refused[0] == refused[1]
    assert "step-2-epoch-1-0-a-0'; allowed: " in refused[0]["refused"]
    assert replica(2, "load", copy, {"seed": 7}, key=None)[1]["digest"] == two[1]
    assert not (copy / "ran").exists()


def test_other_frozen_weights_are_refused(two) -> None:
    """On the ranks of the writer and on another number of them alike."""
    for ranks in (2, 3):
        for each in replica(ranks, "load", two[0], {"still": 1}):
            assert "(still differs)" in each["refused"]


def test_what_is_exported_is_the_unsharded_model(tmp_path) -> None:
    """Of uneven shards; some are empty."""
    folder, out, base = (tmp_path / name for name in ("checkpoints", "out.safetensors", "base.safetensors"))
    replica(3, "save", folder, steps=[1])
    wanted = Uneven(0, 8).state_dict()
    save_file({"still": wanted["still"]}, base)
    assert export(folder, out, None, KEY, base).missing == ()
    made = Uneven(1, 8, 1)
    made.load_state_dict(load_file(out))
    assert all(torch.equal(made.state_dict()[name], tensor) for name, tensor in wanted.items())


def test_what_is_exported_of_tensor_parallel_layers_is_the_whole_model(tmp_path) -> None:
    """Meshes of two dimensions, and of fewer ranks than the replica has."""
    folder, out = tmp_path / "checkpoints", tmp_path / "out.safetensors"
    assert [each["kind"] for each in replica(4, "save_on_two_dimensions", folder)] == ["Published"] * 4
    export(folder, out, None, KEY)
    found, wanted = load_file(out), two_layers().state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_torchs_own_tools_read_it(two, tmp_path) -> None:
    dcp_to_torch_save(two[0] / "step-2-epoch-1-0-a-0", tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert state["param.wide"].shape == (7, 8)


def test_the_checkpoint_of_another_job_is_refused(two) -> None:
    answers = replica(2, "load", two[0], config_hash="other")
    assert answers[0] == answers[1]
    assert "checkpoints of this configuration" in answers[0]["refused"]
    assert "optim wide.exp_avg differs" in replica(2, "load", two[0], {"width": 9})[1]["refused"]


def test_training_goes_on_beside_it_undisturbed(tmp_path) -> None:
    answers = replica(2, "save_beside_training", tmp_path, {"width": 40_000}, count=3)
    assert kinds(answers) == ["Published"] * 3
    assert [each["wrong"] for each in answers] == [0, 0]
    assert answers[0]["beside"] > 3, "the default group was not busy meanwhile"
    assert names(tmp_path) == ["step-2-epoch-1-0-a-0", "step-3-epoch-1-0-a-0"]


def test_ranks_that_ask_at_different_times_publish_the_same(tmp_path) -> None:
    done = kinds(replica(2, "overtaken", tmp_path))
    assert done[-1] == "Published"
    assert set(done) <= {"Published", "Superseded"}
    written = [f"step-{n}-epoch-1-0-a-0" for n, kind in enumerate(done, 1) if kind == "Published"]
    assert names(tmp_path) == written
    assert catalog.newest(tmp_path, KEY).checkpoint is not None


@pytest.mark.parametrize(
    ("on", "limit", "at"), [(0, 3000, ""), (1, 3000, ""), (0, 20, ""), (0, 3000, "checkpoint-write")]
)
def test_a_file_that_cannot_grow_fails_it_on_all_ranks_and_the_next_one_works(tmp_path, on, limit, at) -> None:
    answers = replica(2, "with_disk_full", tmp_path, on=on, limit=limit, at=at)
    assert kinds(answers) == ["Published", "CheckpointNotPublished", "Published"]
    assert answers[0]["outcomes"][1]["reason"] == f"rank {on}: [Errno 27] File too large"
    assert answers[0]["left"] == ["step-1-epoch-1-0-a-0", "step-3-epoch-1-0-a-0"]


def test_a_file_system_without_rename_is_refused_at_the_start(tmp_path) -> None:
    (refused,) = replica(1, "save_on", tmp_path, lacking=[Ability.RENAME])
    assert refused["refused"].startswith("checkpoint.dir: got ")


def test_ranks_with_different_states_publish_nothing(tmp_path) -> None:
    answers = replica(2, "with_different_states", tmp_path)
    assert kinds(answers) == ["CheckpointNotPublished", "Published"]
    assert "different states" in answers[0]["outcomes"][0]["reason"]
    assert names(tmp_path) == ["step-2-epoch-1-0-a-0"]


def test_a_rank_without_memory_for_its_copy_fails_that_checkpoint_alone(tmp_path) -> None:
    answers = replica(2, "with_no_memory_on_one", tmp_path)
    assert kinds(answers) == ["CheckpointNotPublished", "Published"]
    (reason,) = {answer["outcomes"][0]["reason"] for answer in answers}
    assert reason.startswith("rank 1: no memory")
    assert names(tmp_path) == ["step-2-epoch-1-0-a-0"]


def test_a_rank_that_dies_hangs_nobody(tmp_path) -> None:
    answers = replica(2, "with_a_rank_gone", tmp_path)
    assert answers[1] == {"exit": -9}
    assert kinds(answers) == ["Published", "CheckpointNotPublished", "CheckpointNotPublished"]
    assert "lost each other" in answers[0]["outcomes"][1]["reason"]
    assert names(tmp_path) == ["step-1-epoch-1-0-a-0"]


def test_writers_killed_in_a_file_leave_rubbish_that_the_next_start_removes(tmp_path) -> None:
    assert replica(2, "die_in_a_file", tmp_path) == [{"exit": -9}] * 2
    assert names(tmp_path) == [".writing-step-2-epoch-1-0-a-0", "step-1-epoch-1-0-a-0"]
    assert replica(2, "load", tmp_path)[0]["state"][1] == 1
    replica(1, "save", tmp_path, steps=[])
    assert names(tmp_path) == ["step-1-epoch-1-0-a-0"]


def test_a_writer_killed_at_any_call_leaves_a_whole_checkpoint(tmp_path) -> None:
    calls = replica(1, "die_at_call", tmp_path / "0", at=0)[0]["calls"]
    seen = set()
    for at in range(1, calls + 1):
        folder = tmp_path / str(at)
        assert replica(1, "die_at_call", folder, at=at) == [{"exit": -9}]
        found = catalog.newest(folder, KEY)
        assert found.checkpoint is not None
        assert found.skipped == ()
        seen.add(found.checkpoint.manifest.state.step)
        drafts.sweep(folder)
        assert sorted(path.name for path in catalog.published(folder)) == names(folder)
    assert seen == {1, 2}


def test_the_end_waits_for_what_was_asked_for(tmp_path) -> None:
    answers = replica(2, "close_at_once", tmp_path)
    assert kinds(answers) == ["Published", "CheckpointNotPublished", "CheckpointNotPublished"]
    late, ending = (each["reason"] for each in answers[0]["outcomes"][1:])
    assert late.endswith("(1, 1)")
    assert ending == "the job is ending"
    assert names(tmp_path) == ["step-1-epoch-1-0-a-0"]

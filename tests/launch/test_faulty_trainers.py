"""Real jobs of trainers that hang, have no descriptor left, or whose gradients are not finite."""

from pathlib import Path
from typing import Any

import pytest

from ft_hsdp.core.replica_state import ReplicaPolicy
from ft_hsdp.errors import EXIT_CONFIG
from ft_hsdp.launch.run.directory import RunDir, read_json, read_jsonl
from ft_hsdp.launch.run.recorder import commits_of
from ft_hsdp.launch.run.replay import replay
from tests.support.launch.faulty_trainer import POISON, VICTIM
from tests.support.launch.launch_helpers import train
from tests.support.launch.staged_trainer import PAUSE_S

RETRIES = ReplicaPolicy().poison_retries
pytestmark = [pytest.mark.proof, pytest.mark.multiproc]


def summary_of(run: RunDir) -> dict[str, Any]:
    summary = read_json(run.summary)
    assert summary is not None
    return summary


def lives(run: RunDir) -> dict[int, int]:
    return {int(r): s["incarnations"] for r, s in summary_of(run)["replicas"].items()}


def one_state(run: RunDir) -> bool:
    return len({s["digest"] for s in summary_of(run)["replicas"].values()}) == 1


def test_a_job_of_one_replica_survives_each_kind_of_hang(tmp_path: Path) -> None:
    """It hangs where nobody else sees it: before check-in, in a stopped rank, and altogether."""
    run = train(
        tmp_path,
        "tests.support.launch.faulty_trainer:lone",
        150.0,
        replicas=1,
        ranks_per_replica=2,
        train={"steps": 8},
        optim={"clip": None},
        ftar={"timeout_s": 4.0},
        timeouts={"connect_s": 1.0, "evict_s": 2.0, "start_s": 24.0, "ranks_s": 24.0, "step_s": 4.0},
    )
    assert (summary_of(run)["steps"], lives(run)) == (8, {0: 5})
    events = read_jsonl(run.events)
    exited = [e["reason"] for e in events if e["event"] == "ReplicaExited"]
    assert "rank 1 has been stopped" in exited[0]
    assert "not asked" in exited[1] or "ended with exit" in exited[1]
    ended = [e["reason"] for e in events if e["event"] == "RankEnded"]
    assert any("no sign of life" in why for why in ended), ended
    assert any("the trainer hangs" in why for why in ended), ended


def test_a_rank_without_descriptors_is_replaced_and_no_healthy_one_is_left_out(tmp_path: Path) -> None:
    """It has none left when a new ring is formed."""
    run = train(
        tmp_path,
        "tests.support.launch.faulty_trainer:full",
        replicas=3,
        ranks_per_replica=1,
        train={"steps": 40},
        optim={"clip": None},
        ftar={"transport": "tcp"},
        chaos=[{"at_step": 8, "replicas": [2]}],
    )
    assert lives(run) == {0: 1, VICTIM: 2, 2: 2}, "only the one without descriptors and the killed one start again"
    assert one_state(run)
    events = read_jsonl(run.events)
    (ended,) = [e for e in events if e["event"] == "RankEnded"]
    assert (ended["replica"], ended["code"]) == (VICTIM, 75)
    assert "RLIMIT_NOFILE" in ended["reason"]
    assert not [e for e in events if e["event"] == "ReplicaExcluded" and e["replica"] == 0]
    blamed = {e["suspect"] for e in events if e["event"] == "RingBroken" and e["replica"] != VICTIM}
    assert 0 not in blamed
    exited = [e for e in events if e["event"] == "ReplicaExited" and e["replica"] == VICTIM]
    assert "RLIMIT_NOFILE" in exited[0]["reason"]


@pytest.mark.parametrize(
    ("replicas", "mads", "why"),
    [(2, None, "gradient of replicas [1] is not finite"), (3, 8.0, "norm of the gradient of replicas [1] is far")],
)
def test_a_batch_that_is_never_finite_is_given_up(tmp_path: Path, replicas, mads, why) -> None:
    """It is left out of some steps first. So is one whose gradient is far larger than that of the others."""
    entry = "tests.support.launch.faulty_trainer:poisoned"
    job: dict[str, Any] = {"train": {"steps": 12, "norm_mads": mads}, "optim": {"clip": None}}
    run = train(tmp_path, entry, replicas=replicas, ranks_per_replica=1, **job)
    assert one_state(run)
    assert set(lives(run).values()) == {1}, "nobody was ended for it"
    batches = summary_of(run)["batches"]
    assert (batches["duplicated"], batches["skipped"], batches["given_up"]) == (0, 0, 1)
    rows = read_jsonl(run.metrics)
    everybody = list(range(replicas))
    assert sum(row["contributors"] == [r for r in everybody if r != 1] for row in rows) == RETRIES
    assert rows[-1]["contributors"] == everybody, "replica 1 has gone on to its next batch"
    for replica in everybody:
        again = [e for e in read_jsonl(run.replica_events(replica)) if e["event"] == "StepRetried"]
        assert [why in e["reason"] for e in again] == [True] * RETRIES
        (event,) = [e for e in read_jsonl(run.replica_events(replica)) if e["event"] == "BatchGivenUp"]
        assert (event["shard"], event["index"]) == POISON


# A whole job on the GPU data plane: a replica is killed and heals, and a replay on the CPU has the same bits.


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed (pip install triton)")
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def staged(steps: int) -> dict[str, Any]:
    train = {"steps": steps, "seq_len": 32, "micro_batch": 2}
    return {"replicas": 2, "ranks_per_replica": 1, "train": train, "model": {"dim": 32, "layers": 2, "heads": 2}}


@pytest.mark.usefixtures("interpreted")
def test_a_staged_job_loses_a_replica_and_heals(tmp_path: Path) -> None:
    run = train(
        tmp_path,
        "tests.support.launch.staged_trainer:main",
        **staged(steps=14),
        chaos=[{"at_step": 5, "replicas": [1]}],
    )
    logs = [(run.path / "replicas" / str(n) / "rank0.log").read_text() for n in (0, 1)]
    assert [log.count("staged\n") for log in logs] == [1, 2]
    assert any(e["event"] == "FetchCompleted" for e in read_jsonl(run.replica_events(1)))
    verdict = replay(run)
    assert verdict.equal, str(verdict)


@pytest.mark.usefixtures("interpreted")
def test_a_pause_that_is_longer_than_every_limit_ends_nobody(tmp_path: Path) -> None:
    """The kernel of the other replica waits for as long as its engine lives; kernels find what is voted on."""
    run = train(
        tmp_path,
        "tests.support.launch.staged_trainer:pausing",
        **staged(steps=10),
        ftar={"timeout_s": 4.0},
        timeouts={"connect_s": 2.0},
    )
    assert lives(run) == {0: 1, 1: 1}
    assert one_state(run)
    assert max(row["step_s"] for row in commits_of(run)) > PAUSE_S
    assert not [e for e in read_jsonl(run.replica_events(0)) if e["event"] in ("RingBroken", "StepRetried")]


def test_a_loop_that_does_not_weigh_ends_the_job_with_one_line(tmp_path, capfd) -> None:
    """Its ranks are in the middle of a backward, whose collectives hang without the one that ends."""
    train(
        tmp_path,
        "tests.support.launch.faulty_trainer:unweighed",
        code=EXIT_CONFIG,
        replicas=2,
        ranks_per_replica=2,
        data={"weight": "tokens"},
    )
    assert "job.weigh: got None" in capfd.readouterr().err

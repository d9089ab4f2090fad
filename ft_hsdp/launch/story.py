"""Events in words, for the terminal and for `explain`. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ft_hsdp.launch.rundir import Row
from ft_hsdp.launch.starts import starts, table


def _who(e: Row) -> str:
    rank = e.get("rank")
    return f"replica {e.get('replica')}" + (f" rank {rank}" if rank is not None else "")


def _ids(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


_TOLD: dict[str, Callable[[Row], str]] = {
    "FailureInjected": lambda e: (
        str(e["reason"]) if "target" in e else f"{e['kind']} sent to {_who(e)} (pid {e['pid']})"
    ),
    "FailureLifted": lambda e: f"{e['kind']} of {e['target']} ends" if "target" in e else f"{_who(e)} continues",
    "ProcessExited": lambda e: f"{_who(e)} is gone: {e['kind']}",
    "ReplicaExited": lambda e: f"replica {e['replica']} is down: {e['kind']}",
    "EvictionOrdered": lambda e: f"replica {e['replica']} is evicted",
    "AdminEvicted": lambda e: f"an operator evicts replica {e['replica']}",
    "AdminDrained": lambda e: f"an operator drains replica {e['replica']}",
    "AdminUndrained": lambda e: f"an operator lets replica {e['replica']} come back",
    "AdminScaled": lambda e: f"an operator scales the job to {e['replicas']} replicas",
    "CheckpointOrdered": lambda e: "an operator orders a checkpoint",
    "JobScaled": lambda e: f"the job is to have {e['replicas']} replicas, not {e['before']}",
    "LeaveRequested": lambda e: f"replica {e['replica']} is to leave",
    "ReplicaDrained": lambda e: f"replica {e['replica']} is to stay away",
    "ReplicaUndrained": lambda e: f"replica {e['replica']} may come back",
    "ReplicaStarted": lambda e: f"replica {e['replica']} started as {e['incarnation']}, {e.get('how', 'cold')}",
    "ReplicaBooted": lambda e: f"replica {e['replica']} runs",
    "FirstStepCommitted": lambda e: f"replica {e['replica']} committed its first step, {e.get('step', '?')}",
    "SpareWarmed": lambda e: f"spare {e['spare']} is ready after {e['seconds']:.1f} s",
    "SpareLost": lambda e: f"spare {e['spare']} is lost",
    "RestartScheduled": lambda e: f"replica {e['replica']} will be started again",
    "ReplicaUnplaced": lambda e: f"replica {e['replica']} has no place, the others go on without it",
    "LogLinesLost": lambda e: (
        f"{e['file']} of {_who(e) if e.get('replica') is not None else 'the job'} lacks "
        f"{e['lines']} lines: its disk was full or failed"
    ),
    "SupervisorStandsBy": lambda e: f"replica {e['replica']} is not started here",
    "SupervisorLeased": lambda e: f"another supervisor runs replica {e['replica']} from now on",
    "LogCut": lambda e: f"{_who(e)} took its last lines along",
    "ReplicaLost": lambda e: f"replica {e['replica']} is lost",
    "ReplicaStuck": lambda e: f"replica {e['replica']} does not end",
    "ReplicaWarmed": lambda e: f"replica {e['replica']} is warm",
    "CheckedIn": lambda e: f"replica {e['replica']} checked in",
    "RingBroken": lambda e: f"replica {e['replica']} saw its ring break, suspects {e.get('suspect')}",
    "StepRetried": lambda e: f"replica {e['replica']} repeats the ring of step {e.get('step', '?')}",
    "LeftBehind": lambda e: f"replica {e['replica']} is behind",
    "ForkServerLost": lambda e: f"the fork server (pid {e['pid']}) is given up",
    "StateAgentLost": lambda e: f"{_who(e)} goes on without its state agent",
    "StateAgentReplaced": lambda e: f"{_who(e)} replaced its state agent",
    "StateAgentFound": lambda e: f"{_who(e)} has a state agent again",
    "SnapshotCorrupt": lambda e: f"{_who(e)} dropped a damaged copy of step {e.get('step', '?')}",
    "StateCorrupt": lambda e: f"{_who(e)} found its own memory changed, and ends",
    "FetchStarted": lambda e: f"replica {e['replica']} fetches the state",
    "FetchCompleted": lambda e: (
        f"{_who(e)} fetched {e.get('bytes', 0) / 1e6:.1f} MB in {e.get('seconds', 0):.2f} s"
        f" from replica {e['donor']}"
    ),
    "FetchRejected": lambda e: f"replica {e['replica']} refused a fetched state",
    "Rejoined": lambda e: f"replica {e['replica']} is equal again at step {e.get('step', '?')}",
    "LeaseUsed": lambda e: f"replica {e['replica']} goes on with its last grant",
    "LeaseEnded": lambda e: (
        f"replica {e['replica']} and its ring stop before step {e.get('step', '?')} until a lighthouse answers"
    ),
    "LighthouseAwaited": lambda e: f"replica {e['replica']} waits for a lighthouse, to join again",
    "BatchGivenUp": lambda e: (
        f"batch {e.get('index')} of data shard {e.get('shard')} is given up, nobody will train it"
    ),
    "DoubtResolved": lambda e: f"replica {e['replica']} applies step {e.get('step', '?')}, which was in doubt",
    "GrantRefused": lambda e: f"replica {e['replica']} refuses a grant",
    "RankEnded": lambda e: f"{_who(e)} ends itself",
    "Finished": lambda e: f"replica {e['replica']} holds the final state",
    "Left": lambda e: f"replica {e['replica']} leaves",
    "EpochGranted": lambda e: f"epoch {e['epoch']}: members {_ids(e['members'])} at step {e['step']}",
    "ReplicaExcluded": lambda e: f"replica {e['replica']} is left out",
    "ReplicaEvicted": lambda e: f"the lighthouse evicts replica {e['replica']}",
    "ExitReported": lambda e: f"exit of {e['incarnation']} reported",
    "EdgeBroken": lambda e: (
        f"replicas {_ids(e['replicas'])} cannot connect to each other, "
        + (f"replica {e['excluded']} is left out" if "excluded" in e else "they are put apart in the ring")
    ),
    "StoreBehind": lambda e: (
        "the lighthouse has an older copy of its store, and learns the rest from the replicas"
    ),
    "RewindOrdered": lambda e: (
        f"replicas {_ids(e['replicas'])} differ: all begin again from the newest checkpoint"
    ),
    "HeadRolledBack": lambda e: "the head was rolled back",
    "AskRefused": lambda e: f"replica {e.get('replica')} was refused",
    "LighthouseStarted": lambda e: "the lighthouse is up",
    "LighthouseSilent": lambda e: "the lighthouse answers nothing",
    "LighthouseExited": lambda e: "the lighthouse is gone",
    "StoreFailed": lambda e: "the lighthouse's disk takes no writes, it decides nothing new",
    "StoreRecovered": lambda e: "the lighthouse's disk takes writes again",
    "LighthouseFailed": lambda e: "the lighthouse did not start",
    "LighthouseRestarted": lambda e: "the lighthouse is back",
    "Waiting": lambda e: "the lighthouse waits",
    "JobFinished": lambda e: "the job has its final state",
}

NOTABLE = frozenset(
    {
        "FailureInjected",
        "FailureLifted",
        "RingBroken",
        "ProcessExited",
        "EvictionOrdered",
        "JobScaled",
        "LeaveRequested",
        "ReplicaDrained",
        "ReplicaUndrained",
        "RestartScheduled",
        "ReplicaUnplaced",
        "SupervisorStandsBy",
        "SupervisorLeased",
        "LogCut",
        "LogLinesLost",
        "ReplicaLost",
        "ReplicaStuck",
        "LeftBehind",
        "FetchCompleted",
        "FetchRejected",
        "ForkServerLost",
        "SnapshotCorrupt",
        "StateCorrupt",
        "EpochGranted",
        "ReplicaExcluded",
        "HeadRolledBack",
        "RewindOrdered",
        "EdgeBroken",
        "StoreBehind",
        "LighthouseExited",
        "LighthouseFailed",
        "StoreFailed",
        "StoreRecovered",
        "LighthouseRestarted",
        "LeaseUsed",
        "BatchGivenUp",
        "LighthouseAwaited",
        "LeaseEnded",
    }
)
"""The events that a live view shows."""


def tell(event: Row, *, reason: bool = True) -> str:
    """One sentence on one event."""
    try:
        text = _TOLD[event["event"]](event)
    except (KeyError, TypeError, ValueError):
        text = " ".join([event["event"], *([_who(event)] if event.get("replica") is not None else [])])
    why = event.get("reason") if reason else None
    return f"{text} - {why}" if why and why != text else text


def story(events: Iterable[Row], failures: Sequence[Row] = (), lost: Sequence[int] = ()) -> list[str]:
    """A run as lines: every decision with its reason, how long each start took, each failure in one paragraph."""
    ordered = sorted(events, key=lambda e: e["t"])
    if not ordered:
        return ["nothing is recorded"]
    start = ordered[0]["t"]
    lines = [f"{e['t'] - start:9.3f} s  {tell(e)}" for e in ordered]
    started = starts(ordered, failures)
    if started:
        lines += ["", *table(started)]
    for n, failure in enumerate(failures, 1):
        lines += ["", f"failure {n}: {account(failure, start)}"]
    lines += [f"replica {replica} was lost: its restarts were used up" for replica in lost]
    return lines


def account(failure: Row, start: float) -> str:
    """One failure of summary.json in words; `start` is the run's first moment."""
    back = failure["rejoin_s"] if failure.get("back", True) else None
    came = f"contributed again after {back:.2f} s" if back is not None else "did not contribute again"
    seen = failure["detect_s"]
    noticed = f"seen after {seen * 1e3:.0f} ms" if seen is not None else "seen after an unknown time"
    donor = f", with the state of replica {failure['source']}" if failure["source"] else ""
    rank = f" rank {failure['rank']}" if failure["rank"] is not None else ""
    return (
        f"{failure['kind']} of replica {failure['replica']}{rank} at {failure['t'] - start:.3f} s; "
        f"{noticed}; the others lost {failure['stall_s']:.2f} s; "
        f"it {came}{donor}"
    )

"""Every event and every kind of failure in plain words, for the page, the terminal and `explain`. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

HOSTS = 4  # that one sentence names

Row = Mapping[str, Any]


_KEPT = {  # by rung: who had the state
    "agent": ", which its own hosts kept in memory",
    "copy": ", put together from copies in memory",
    "replica": ", put together from the memory of other replicas",
    "checkpoint": ", by the newest checkpoint",
}


def _restored(e: Row) -> str:
    """Return with which state a replica comes back, and what is lost with it."""
    rung, lost, hosts = e.get("rung"), e.get("lost_steps"), e.get("from")
    if rung == "initial":
        return "begins with its initial weights: no copy of its state is left"
    named = sorted(set(hosts.values())) if rung in ("copy", "replica") and isinstance(hosts, Mapping) else []
    more = ", ..." if len(named) > HOSTS else ""
    on = f" (hosts {', '.join(named[:HOSTS])}{more})" if named else ""
    cost = f"; {lost} {'step is' if lost == 1 else 'steps are'} lost" if isinstance(lost, int) and lost else ""
    cut = f" from shards of {e['width']} ranks," if "width" in e else ""
    return f"goes on{cut} from its state of step {e.get('step', '?')}{_KEPT.get(str(rung), '')}{on}{cost}"


def _who(e: Row) -> str:
    rank = e.get("rank")
    return f"replica {e.get('replica')}" + (f" rank {rank}" if rank is not None else "")


def _units(e: Row) -> str:
    return f"{e.get('units')} units from {e.get('index')} of data shard {e.get('shard')}"


def _ids(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _standing_by(e: Row) -> str:
    roles = e.get("roles")
    ids = [r for r, role in roles.items() if role == "standby"] if isinstance(roles, Mapping) else []
    return f", {_ids(ids)} on standby" if ids else ""


_LIFTED = {
    "host": "the host is back, without what its memory held",
    "helper": "it continues",
    "partition": "messages pass again",
}
"""What is over, by the kind of an injected failure."""

SENTENCES: dict[str, Callable[[Row], str]] = {
    "FailureInjected": lambda e: (
        str(e["reason"]) if "target" in e else f"{e['kind']} sent to {_who(e)} (pid {e['pid']})"
    ),
    "FailureLifted": lambda e: (
        f"{e['target']}: {_LIFTED.get(e['kind'], e['kind'])}" if "target" in e else f"{_who(e)} continues"
    ),
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
    "SpareAgentLost": lambda e: f"the state agent of spare host {e['host']} ended before a replica needed it",
    "RestartScheduled": lambda e: f"replica {e['replica']} will be started again",
    "StartPrevented": lambda e: f"replica {e['replica']} cannot be started now",
    "StartAllowed": lambda e: f"replica {e['replica']} could be started again",
    "ReplicaUnplaced": lambda e: f"replica {e['replica']} has no place, the others go on without it",
    "JobGivenUp": lambda e: f"the job is given up: step {e.get('step', '?')} ends all replicas again and again",
    "HostReplaced": lambda e: f"host {e['host']} takes the place of host {e['before']} of replica {e['replica']}",
    "HostLent": lambda e: f"replica {e['replica']} lends host {e['host']} to replica {e['to']}",
    "Shrunk": lambda e: f"replica {e['replica']} goes on with {e['to']} ranks instead of {e['from']}",
    "Grown": lambda e: f"replica {e['replica']} has {e['to']} ranks again, instead of {e['from']}",
    "TooFewRanks": lambda e: f"replica {e['replica']} is not started with {e['ranks']} ranks again: too few",
    "HostCordoned": lambda e: f"host {e['host']} is cordoned: it gets no ranks any more",
    "LogLinesLost": lambda e: (
        f"{e['file']} of {_who(e) if e.get('replica') is not None else 'the job'} lacks "
        f"{e['lines']} lines: its disk was full or failed"
    ),
    "SupervisorStandsBy": lambda e: f"replica {e['replica']} is not started here",
    "SupervisorLeased": lambda e: f"another supervisor runs replica {e['replica']} from now on",
    "LogCut": lambda e: f"{_who(e)} took its last lines along",
    "ReplicaLost": lambda e: f"replica {e['replica']} is lost",
    "ReplicaWarmed": lambda e: f"replica {e['replica']} is warm",
    "CheckedIn": lambda e: f"replica {e['replica']} checked in",
    "RingBroken": lambda e: (
        f"replica {e['replica']} saw its ring break, and suspects "
        + ("no replica" if e.get("suspect") is None else f"replica {e['suspect']}")
    ),
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
        (f"{e['units']} units from " if "units" in e else "batch ")  # an earlier version counted batches
        + f"{e.get('index')} of data shard {e.get('shard')} will not be trained: given up"
    ),
    "BatchBlamed": lambda e: f"{_units(e)} will not be tried again",
    "BatchLeftOut": lambda e: f"{_units(e)} are left out of step {e.get('step')}",
    "BatchReduced": lambda e: (
        f"steps of epoch {e.get('epoch', '?')} have {e.get('units', '?')} units, not {e.get('units_wanted', '?')}"
    ),
    "DoubtResolved": lambda e: f"replica {e['replica']} applies step {e.get('step', '?')}, which was in doubt",
    "GrantRefused": lambda e: f"replica {e['replica']} refuses a grant",
    "RankEnded": lambda e: f"{_who(e)} ends itself",
    "Finished": lambda e: f"replica {e['replica']} holds the final state",
    "Left": lambda e: f"replica {e['replica']} leaves",
    "EpochGranted": lambda e: (
        f"epoch {e['epoch']}: members {_ids(e['members'])} at step {e['step']}" + _standing_by(e)
    ),
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
    "ReportDoubted": lambda e: f"replica {e['replica']} reports what no other confirms, and is not believed",
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
    "DamagedFileSetAside": lambda e: "the lighthouse has set aside a file that is damaged",
    "JobFilePutBack": lambda e: "a file that the job needs is put back",
    "LighthouseFailed": lambda e: "the lighthouse did not start",
    "LighthouseRestarted": lambda e: "the lighthouse is back",
    "Waiting": lambda e: "the lighthouse waits",
    "JobFinished": lambda e: "the job has its final state",
    "Ended": lambda e: f"replica {e['replica']} ends",
    "GrantAdopted": lambda e: f"replica {e['replica']} takes its place in epoch {e.get('epoch', '?')}",
    "RingConnected": lambda e: f"{_who(e)} is connected to both neighbours in epoch {e.get('epoch', '?')}",
    "StepSkipped": lambda e: f"step {e.get('step', '?')} changes no weight",
    "StateDiverged": lambda e: (
        f"the state of replica {_ids(e['replicas'])} differs from that of the others"
        if e.get("majority")
        else f"the states of replicas {_ids(e['replicas'])} differ, and no majority says which is right"
    ),
    "JobDoubted": lambda e: f"training changes {e.get('tensor', '?')}, and the committed state does not have it",
    "BufferChanged": lambda e: f"training changes {e.get('tensor', '?')}, which each replica has for itself",
    "BufferRestored": lambda e: f"a change of {e.get('tensor', '?')} is taken back",
    "StateRestored": lambda e: f"replica {e['replica']} {_restored(e)}",
    "CheckpointStarted": lambda e: f"replica {e['replica']} writes a checkpoint of step {e.get('step', '?')}",
    "CheckpointWritten": lambda e: f"the checkpoint of step {e.get('step', '?')} is written",
    "CheckpointFailed": lambda e: f"the checkpoint of step {e.get('step', '?')} failed",
    "CheckpointWriterLost": lambda e: f"replica {_ids(e['replicas'])} was lost while it wrote a checkpoint",
    "CheckpointMissing": lambda e: f"no replica has written the checkpoint of step {e.get('step', '?')}",
    "CheckpointPassedOver": lambda e: f"the checkpoint {e['checkpoint']} is passed over",
    "SettingChanged": lambda e: f"{e['setting']} is {e['new']} now, and was {e['old']} in the checkpoint",
    "SettingsUnknown": lambda e: "optimizer and schedule go on with the values of the checkpoint",
    "SnapshotSkipped": lambda e: f"{_who(e)} keeps no copy of its state of step {e.get('step', '?')}",
    "CopiesPlanned": lambda e: (
        f"{e.get('hosts', '?')} hosts keep copies of the shards of replica {e['replica']}"
        if e.get("hosts")
        else f"no host is to keep copies of the shards of replica {e['replica']}"
    ),
    "CopyMissing": lambda e: f"{_who(e)} votes without copies of other hosts' shards of step {e.get('step', '?')}",
    "CopyMoved": lambda e: (
        f"host {e.get('holder', '?')} is to keep the copy of rank {e.get('shard', '?')} of replica {e['replica']}"
    ),
    "CopiesPaced": lambda e: (
        f"copies of {_who(e)} leave in the idle spans that were measured"
        if e.get("planned")
        else f"copies of {_who(e)} leave whenever nothing else is sent"
    ),
    "CopiesSlowed": lambda e: f"copies are made of each {e.get('every', '?')}. state: those of more take too long",
    "CopiesResumed": lambda e: f"copies are made of each {e.get('every', '?')}. state again",
    "Protected": lambda e: (
        f"the state is protected: each shard is on {e.get('copies', '?')} {e.get('apart', 'host')}s"
    ),
    "Unprotected": lambda e: (
        f"the state is not protected: a lost {e.get('apart', 'host')} may take a shard with it"
    ),
    "BlocksSubmitted": lambda e: (
        f"blocks of {e.get('store', '?')} are in memory, each on {e.get('copies', '?')} hosts"
    ),
    "BlocksUnprotected": lambda e: f"blocks of {e.get('store', '?')} are on {e.get('copies', '?')} hosts only",
    "BlocksRejected": lambda e: f"host {e.get('host', '?')} delivers no blocks of {e.get('store', '?')}",
    "BlocksRead": lambda e: (
        f"{e.get('blocks', '?')} blocks of {e.get('store', '?')} are read from their source again"
    ),
    "SnapshotsNotForgotten": lambda e: f"{_who(e)} could not have its wrong copies dropped",
    "StateAgentNotStarted": lambda e: f"{_who(e)} cannot start a state agent",
    "ReplicaStalled": lambda e: f"replica {e['replica']} does not get on",
    "ReplicaResumed": lambda e: f"replica {e['replica']} gets on again",
    "StragglerSeen": lambda e: f"replica {e['replica']} is slower than the others",
    "StragglerGone": lambda e: f"replica {e['replica']} is as fast as the others again",
    "RowsDropped": lambda e: f"{e['rows']} rows of telemetry are lost",
    "JobHalted": lambda e: "the job cannot go on",
    "LighthouseElected": lambda e: f"the lighthouse at {e['url']} leads from now on",
    "LighthouseDeposed": lambda e: f"the lighthouse at {e['url']} does not lead any more",
}
"""The sentence of each event; every event name that ft_hsdp writes is here."""

_FAULTS = {
    "SIGSTOP": "was stopped by SIGSTOP",
    "SIGTERM": "was told to end by SIGTERM",
    "exit 64": "refused its configuration (exit 64)",
    "exit 69": "found no lighthouse (exit 69)",
    "exit 75": "ended itself, to be started again (exit 75)",
    "exit 76": "ended itself, for its hardware is broken (exit 76)",
    "exit 0 of some ranks only": "ended on some of its ranks only",
    "exit 0 before the end": "ended before the job did",
    "left": "left",
    "evicted": "was evicted",
    "not started": "could not be started",
    "ring broken": "was suspected when a ring broke",
    "silent": "fell silent and was left out",
    "host": "lost a host",
    "helper": "had a helper process that was killed or stopped",
    "partition": "was cut off by the network",
    "reset": "had its connections reset",
    "flip": "had a flipped byte in a copy of its state",
}
"""What happened to a replica, by the kind of its failure."""


def fault(kind: str) -> str:
    """Return what happened to a replica whose failure is of `kind`, such as "was killed by SIGKILL"."""
    if kind in _FAULTS:
        return _FAULTS[kind]
    if kind.startswith(("SIG", "signal ")):
        return f"was killed by {kind}"
    return f"ended with an error ({kind})" if kind.startswith("exit ") else f"failed: {kind}"


def tell(event: Row, *, reason: bool = True) -> str:
    """Return one sentence on an event.

    Args:
        event: a row of events.jsonl.
        reason: whether the event's reason is added.

    Returns:
        The sentence; for an unknown event, or one that lacks facts, its name.
    """
    try:
        text = SENTENCES[event["event"]](event)
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        OverflowError,
    ):  # facts that are missing or of another kind
        text = " ".join([event["event"], *([_who(event)] if event.get("replica") is not None else [])])
    why = event.get("reason") if reason else None
    return f"{text} - {why}" if why and why != text else text

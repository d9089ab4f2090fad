"""The table of events: what each one says, and what it means to terminal, page, lighthouse and analysis. Pure.

Also the words of each kind of failure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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


def _suspects(e: Row) -> str:
    """Return who is found to keep the job waiting; one of several, if it is not known which."""
    if e.get("rank") is not None:
        return _who(e)
    named = e.get("suspects")
    return f"one of the ranks {_ids(named[:HOSTS])}" if isinstance(named, list) else "a rank"


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

_ORDERED = {
    "evict": "an operator evicts replica {replica}",
    "drain": "an operator drains replica {replica}: it is to stay away",
    "undrain": "an operator lets replica {replica} come back",
    "drain-host": "an operator drains host {host}: it is to have no ranks",
    "undrain-host": "an operator lets host {host} have ranks again",
    "host-lost": "an operator says that host {host} is gone",
    "scale": "an operator scales the job to {replicas} replicas",
    "checkpoint": "an operator orders a checkpoint",
}
"""What an operator does, by the order."""


@dataclass(frozen=True, slots=True)
class EventKind:
    """What one kind of event means, everywhere."""

    # Names of facts stand in braces, `who` for replica and rank; a function is for what that cannot say.
    sentence: str | Callable[[Row], str]
    over: str = ""  # the sentence of a row that has "over": what the event names has ended, or is undone
    grave: bool = False  # a failure, unless it is over: red on the page and on the terminal
    good: bool = False  # green on the terminal
    told: bool = False  # the terminal shows it while the job runs
    once: bool = False  # every replica says it: the terminal shows the same sentence once
    decision: bool = False  # only the lighthouse may send it: the overview believes it
    lane: str = ""  # the state into which it puts its replica, until that contributes
    mark: str = ""  # the phase of a change of membership that begins with it (`analysis.goodput`)


EVENTS: dict[str, EventKind] = {
    "FailureInjected": EventKind(
        lambda e: str(e["reason"]) if "target" in e else f"{e['kind']} sent to {_who(e)} (pid {e['pid']})",
        grave=True,
        told=True,
        mark="failed",
    ),
    "FailureLifted": EventKind(
        lambda e: (
            f"{e['target']}: {_LIFTED.get(e['kind'], e['kind'])}" if "target" in e else f"{_who(e)} continues"
        ),
        told=True,
    ),
    "ProcessExited": EventKind("{who} is gone: {kind}", grave=True, told=True, mark="seen"),
    "ReplicaExited": EventKind("replica {replica} is down: {kind}", grave=True),
    "EvictionOrdered": EventKind("replica {replica} is evicted", grave=True, told=True),
    "OperatorOrdered": EventKind(
        lambda e: _ORDERED.get(e["order"], "an operator orders {order}").format_map(e), told=True, decision=True
    ),
    "LeaveRequested": EventKind("replica {replica} is to leave", told=True),
    "ReplicaStarted": EventKind(
        lambda e: f"replica {e['replica']} started as {e['incarnation']}, {e.get('how', 'cold')}"
    ),
    "ReplicaBooted": EventKind("replica {replica} runs"),
    "FirstStepCommitted": EventKind("replica {replica} committed its first step, {step}"),
    "SpareWarmed": EventKind("spare {spare} is ready after {seconds:.1f} s"),
    "SpareLost": EventKind(
        lambda e: (
            f"spare {e['spare']} is lost"
            if e.get("spare") is not None
            else f"the state agent of spare host {e['host']} ended before a replica needed it"
        ),
        told=True,
    ),
    "RestartScheduled": EventKind("replica {replica} will be started again", told=True),
    "StartPrevented": EventKind(
        "replica {replica} cannot be started now", over="replica {replica} could be started again", told=True
    ),
    "ReplicaUnplaced": EventKind("replica {replica} has no place, the others go on without it", told=True),
    "JobGivenUp": EventKind("the job is given up: step {step} ends all replicas again and again", told=True),
    "HostReplaced": EventKind("host {host} takes the place of host {before} of replica {replica}", told=True),
    "HostLent": EventKind("replica {replica} lends host {host} to replica {to}", told=True),
    "Shrunk": EventKind("replica {replica} goes on with {to} ranks instead of {from}", told=True),
    "Grown": EventKind("replica {replica} has {to} ranks again, instead of {from}", told=True),
    "TooFewRanks": EventKind("replica {replica} is not started with {ranks} ranks again: too few", told=True),
    "HostCordoned": EventKind("host {host} is cordoned: it gets no ranks any more", told=True),
    "LogLinesLost": EventKind(
        lambda e: (
            f"{e['file']} of {_who(e) if e.get('replica') is not None else 'the job'} lacks "
            f"{e['lines']} lines: its disk was full or failed"
        ),
        grave=True,
        told=True,
    ),
    "LogCut": EventKind("{who} took its last lines along", told=True),
    "ReplicaLost": EventKind("replica {replica} is lost", grave=True, told=True),
    "ReplicaWarmed": EventKind("replica {replica} is warm", lane="warming"),
    "CheckedIn": EventKind("replica {replica} checked in", lane="warming"),
    "RingBroken": EventKind(
        lambda e: (
            f"replica {e['replica']} saw its ring break, and suspects "
            + ("no replica" if e.get("suspect") is None else f"replica {e['suspect']}")
        ),
        grave=True,
        told=True,
        lane="retrying",
        mark="seen",
    ),
    "StepRetried": EventKind("replica {replica} repeats the ring of step {step}", lane="retrying"),
    "LeftBehind": EventKind("replica {replica} is behind", told=True, lane="behind"),
    "ForkServerLost": EventKind("the fork server (pid {pid}) is given up", grave=True, told=True),
    "StateAgentLost": EventKind(
        "{who} goes on without its state agent", over="{who} has a state agent again", grave=True, told=True
    ),
    "SnapshotCorrupt": EventKind("{who} dropped a damaged copy of step {step}", grave=True, told=True),
    "StateCorrupt": EventKind("{who} found its own memory changed, and ends", grave=True, told=True),
    "FetchStarted": EventKind("replica {replica} fetches the state", lane="fetching", mark="fetching"),
    "FetchCompleted": EventKind(
        lambda e: (
            f"{_who(e)} fetched {e.get('bytes', 0) / 1e6:.1f} MB in {e.get('seconds', 0):.2f} s"
            f" from replica {e['donor']}"
        ),
        good=True,
        told=True,
        lane="behind",
    ),
    "FetchRejected": EventKind("replica {replica} refused a fetched state", grave=True, told=True),
    "Rejoined": EventKind("replica {replica} is equal again at step {step}", lane="training"),
    "LeaseUsed": EventKind("replica {replica} goes on with its last grant", told=True),
    "LeaseEnded": EventKind(
        "replica {replica} and its ring stop before step {step} until a lighthouse answers", grave=True, told=True
    ),
    "LighthouseAwaited": EventKind("replica {replica} waits for a lighthouse, to join again", told=True),
    "BatchGivenUp": EventKind(
        lambda e: f"{_units(e)} will not be trained: given up",
        grave=True,
        told=True,
    ),
    "BatchBlamed": EventKind(lambda e: f"{_units(e)} will not be tried again", told=True),
    "BatchLeftOut": EventKind(lambda e: f"{_units(e)} are left out of step {e.get('step')}", told=True),
    "BatchReduced": EventKind(
        "steps of epoch {epoch} have {units} units, not {units_wanted}", told=True, decision=True
    ),
    "DoubtResolved": EventKind("replica {replica} applies step {step}, which was in doubt"),
    "GrantRefused": EventKind("replica {replica} refuses a grant"),
    "RankEnded": EventKind("{who} ends itself", grave=True),
    "EpochGranted": EventKind(
        lambda e: f"epoch {e['epoch']}: members {_ids(e['members'])} at step {e['step']}" + _standing_by(e),
        told=True,
        decision=True,
        mark="granted",
    ),
    "ReplicaExcluded": EventKind(
        "replica {replica} is left out", grave=True, told=True, decision=True, lane="stalled", mark="seen"
    ),
    "ReplicaEvicted": EventKind("the lighthouse evicts replica {replica}", decision=True),
    "ExitReported": EventKind("exit of {incarnation} reported", decision=True, mark="seen"),
    "EdgeBroken": EventKind(
        lambda e: (
            f"replicas {_ids(e['replicas'])} cannot connect to each other, "
            + (f"replica {e['excluded']} is left out" if "excluded" in e else "they are put apart in the ring")
        ),
        grave=True,
        told=True,
        decision=True,
    ),
    "StoreBehind": EventKind(
        "the lighthouse has an older copy of its store, and learns the rest from the replicas",
        grave=True,
        told=True,
        decision=True,
    ),
    "ReportDoubted": EventKind(
        "replica {replica} reports what no other confirms, and is not believed",
        grave=True,
        told=True,
        decision=True,
    ),
    "RewindOrdered": EventKind(
        lambda e: f"replicas {_ids(e['replicas'])} differ: all begin again from the newest checkpoint",
        grave=True,
        told=True,
        decision=True,
    ),
    "HeadRolledBack": EventKind("the head was rolled back", grave=True, told=True, decision=True),
    "AskRefused": EventKind(lambda e: f"{'host ' + e['host'] if 'host' in e else _who(e)} was refused"),
    "LighthouseStarted": EventKind("the lighthouse is up", decision=True),
    "LighthouseSilent": EventKind("the lighthouse answers nothing", grave=True, told=True),
    "LighthouseExited": EventKind("the lighthouse is gone", over="the lighthouse is back", grave=True, told=True),
    "StoreFailed": EventKind(
        "the lighthouse's disk takes no writes, it decides nothing new",
        over="the lighthouse's disk takes writes again",
        grave=True,
        told=True,
        decision=True,
    ),
    "DamagedFileSetAside": EventKind(
        "the lighthouse has set aside a file that is damaged", told=True, decision=True
    ),
    "JobFilePutBack": EventKind("a file that the job needs is put back", told=True),
    "LighthouseFailed": EventKind("the lighthouse did not start", grave=True, told=True),
    "Waiting": EventKind("the lighthouse waits", decision=True),
    "JobFinished": EventKind("the job has its final state", decision=True),
    "Ended": EventKind(
        lambda e: (
            f"replica {e['replica']} "
            + ("ends" if e.get("code") != 0 else "holds the final state" if e.get("final") else "leaves")
        )
    ),
    "GrantAdopted": EventKind("replica {replica} takes its place in epoch {epoch}"),
    "RingConnected": EventKind("{who} is connected to both neighbours in epoch {epoch}", mark="connected"),
    "StepSkipped": EventKind("step {step} changes no weight", grave=True, told=True),
    "StateDiverged": EventKind(
        lambda e: (
            f"the state of replica {_ids(e['replicas'])} differs from that of the others"
            if e.get("majority")
            else f"the states of replicas {_ids(e['replicas'])} differ, and no majority says which is right"
        ),
        grave=True,
        told=True,
    ),
    "JobDoubted": EventKind("replicas may differ in {tensor}", grave=True, told=True),
    "BufferChanged": EventKind(
        "training changes {tensor}, which each replica has for itself",
        over="a change of {tensor} is taken back",
        told=True,
    ),
    "StateRestored": EventKind(lambda e: f"replica {e['replica']} {_restored(e)}", lane="warming"),
    "CheckpointStarted": EventKind("replica {replica} writes a checkpoint of step {step}"),
    "CheckpointWritten": EventKind("the checkpoint of step {step} is written"),
    "CheckpointFailed": EventKind(
        lambda e: (
            f"replica {_ids(e['replicas'])} was lost while it wrote a checkpoint"
            if "replicas" in e
            else f"the checkpoint of step {e['step']} failed"
        ),
        grave=True,
        told=True,
    ),
    "CheckpointPassedOver": EventKind("the checkpoint {checkpoint} is passed over", told=True),
    "SettingChanged": EventKind(
        "{setting} is {new} now, and was {old} in the checkpoint",
        told=True,
        once=True,
    ),
    "SnapshotSkipped": EventKind("{who} keeps no copy of its state of step {step}"),
    "CopiesPlanned": EventKind(
        lambda e: (
            f"{e.get('hosts', '?')} hosts keep copies of the shards of replica {e['replica']}"
            if e.get("hosts")
            else f"no host is to keep copies of the shards of replica {e['replica']}"
        )
    ),
    "CopyMissing": EventKind("{who} votes without copies of other hosts' shards of step {step}", told=True),
    "CopyMoved": EventKind("host {holder} is to keep the copy of rank {shard} of replica {replica}", told=True),
    "CopiesPaced": EventKind(
        lambda e: (
            f"copies of {_who(e)} leave in the idle spans that were measured"
            if e.get("planned")
            else f"copies of {_who(e)} leave whenever nothing else is sent"
        )
    ),
    "CopiesSlowed": EventKind(
        "copies are made of each {every}. state: those of more take too long",
        over="copies are made of each {every}. state again",
        told=True,
    ),
    "Protected": EventKind(
        lambda e: f"the state is protected: each shard is on {e.get('copies', '?')} {e.get('apart', 'host')}s",
        told=True,
    ),
    "Unprotected": EventKind(
        lambda e: f"the state is not protected: a lost {e.get('apart', 'host')} may take a shard with it",
        told=True,
    ),
    "BlocksSubmitted": EventKind(
        lambda e: (
            f"blocks of {e.get('store', '?')} are "
            + (
                f"on {e.get('copies', '?')} hosts only"
                if "wanted" in e
                else f"in memory, each on {e.get('copies', '?')} hosts"
            )
        ),
        told=True,
    ),
    "BlocksRejected": EventKind("host {host} delivers no blocks of {store}", told=True),
    "BlocksRead": EventKind("{blocks} blocks of {store} are read from their source again", told=True),
    "StateAgentNotStarted": EventKind("{who} cannot start a state agent"),
    "ReplicaStalled": EventKind(
        "replica {replica} does not get on",
        over="replica {replica} gets on again",
        grave=True,
        decision=True,
        lane="stalled",
    ),
    "StragglerSeen": EventKind(
        "{who} is slower than the others",
        over="replica {replica} is as fast as the others again",
        decision=True,
    ),
    "CulpritFound": EventKind(
        lambda e: f"{_suspects(e)} keeps the job waiting",
        over="the job gets on again",
        grave=True,
        told=True,
        decision=True,
    ),
    "ClockOff": EventKind(
        "the clock of host {host} is wrong", over="that of {host} is right", grave=True, told=True, decision=True
    ),
    "RowsDropped": EventKind("{rows} rows of telemetry are lost"),
    "JobHalted": EventKind("the job cannot go on", grave=True, told=True, decision=True),
    "LighthouseElected": EventKind("the lighthouse at {url} leads from now on", told=True),
    "LighthouseDeposed": EventKind("the lighthouse at {url} does not lead any more", grave=True, told=True),
}
"""Every event that ft_hsdp writes, by name."""

_ORDERLY = ("exit 0", "done", "stopped", "drained")  # how processes end that were meant to end
_OPTIONAL = frozenset(
    {"blocks", "copies", "epoch", "every", "holder", "shard", "step", "store", "tensor", "units", "units_wanted"}
)
"""Facts that earlier versions left out; "?" stands for them."""

FAULTS = {
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
    if kind in FAULTS:
        return FAULTS[kind]
    if kind.startswith(("SIG", "signal ")):
        return f"was killed by {kind}"
    return f"ended with an error ({kind})" if kind.startswith("exit ") else f"failed: {kind}"


def grave(event: Row) -> bool:
    """Return whether an event is a failure; the orderly end of a process is none."""
    kind = EVENTS.get(event["event"])
    return kind is not None and kind.grave and not is_over(event) and event.get("kind") not in _ORDERLY


def is_over(event: Row) -> bool:
    """Return whether an event says that what it names has ended, such as a wait or a failure."""
    return event.get("over") is True


class _Facts(dict[str, Any]):
    """The facts of an event, by the names that its sentence uses."""

    def __init__(self, event: Row) -> None:
        self._event = event

    def __missing__(self, name: str) -> Any:
        if name == "who":
            return _who(self._event)
        return self._event.get(name, "?") if name in _OPTIONAL else self._event[name]


def said(sentence: str | Callable[[Row], str], event: Row) -> str:
    """Return what a sentence of the table says of an event. Raises whatever a fact of another kind leads to."""
    return sentence.format_map(_Facts(event)) if isinstance(sentence, str) else sentence(event)


def tell(event: Row, *, reason: bool = True) -> str:
    """Return one sentence on an event.

    Args:
        reason: whether the event's reason is added.

    Returns:
        The sentence; for an unknown event, or one that lacks facts, its name.
    """
    try:
        kind = EVENTS[event["event"]]
        text = said(kind.over if kind.over and is_over(event) else kind.sentence, event)
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

"""Builds what a lighthouse owns while it leads: the decisions, the journal, the curves and the routes.

A lighthouse that is alone begins once; one of several begins when it has won the election.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from starlette.types import ASGIApp

from ft_hsdp.config import Config, agreed, config_hash
from ft_hsdp.core.replica_state import PROTOCOL, difference
from ft_hsdp.core.units import UnitPolicy
from ft_hsdp.errors import ConfigError
from lighthouse.http.access import Keys
from lighthouse.http.app import create_app
from lighthouse.http.metrics import Meter
from lighthouse.journal.alerts import AlertSink
from lighthouse.journal.database import SqliteDatabase
from lighthouse.journal.exporters import TensorBoardSink, WandbSink
from lighthouse.journal.journal import JobJournal, Sink
from lighthouse.overview.overview import JobInfo
from lighthouse.placement.state import PlacementPolicy
from lighthouse.quorum.commands import Culprit
from lighthouse.quorum.state import Agreement, LighthouseState, Policy
from lighthouse.service import Service
from lighthouse.store import Store
from lighthouse.validation import networks


class LeaderRuntime(NamedTuple):
    """What a lighthouse has from taking the lead to losing it. Close the service first, then the journal."""

    service: Service
    journal: JobJournal
    app: ASGIApp


class LoggedFindings:
    """Passes on what the journal itself finds out, and whom it blames. Its other rows come from logs."""

    def __init__(self, events: Callable[[Mapping[str, object]], None], service: Service) -> None:
        self._events = events
        self._service = service

    def take(self, kind: str, seq: int, row: Mapping[str, Any]) -> None:
        name = row["event"] if kind == "event" else ""
        blames = name in ("CulpritFound", "StragglerSeen")
        if blames or (name == "JobDoubted" and row["source"] == "lighthouse"):
            self._events(row)
        if name == "StragglerSeen" and row["over"]:
            self._service.catches_up(row["replica"])
        elif blames and row["replica"] is not None and not row["over"]:
            told = (row[key] for key in ("replica", "kind", "witnesses", "epoch", "reason", "rank"))
            self._service.suspect(Culprit(*told))

    def close(self) -> None:
        pass


def begin(
    config: Config,
    run: Path,
    keys: Keys,
    store: Store,
    database: SqliteDatabase,
    gap: int,
    url: str,
    events: Callable[[Mapping[str, object]], None],
) -> LeaderRuntime:
    """Lead the job in ``run``, in a term of its own.

    Args:
        gap: How many row numbers to leave out, as in `JobJournal`.
        url: Where the job's page is, without a key.
        events: Takes each event of the lighthouse, as a row of its events.jsonl.

    Raises:
        ConfigError: the store cannot be read, or the job began with other rules.
        StoreFailed: the store does not take the new term.
    """
    state = store.load(policy(config))
    own = Agreement(config_hash(config), rules=tuple(agreed(config).items()))
    _same_rules(state, own)
    meter = Meter()

    def tell(row: Mapping[str, object]) -> None:
        events(row)
        journal.note((row,))

    service = Service(
        state,
        store,
        keys.worker,
        tell,
        name=config.job.name,
        agreed=own,
        allow=networks(config.network.allow),
        long_poll_s=config.timeouts.ask_s,
    )
    sinks: list[Sink] = [meter, LoggedFindings(events, service), *_curves(config, run, database)]
    alerts = AlertSink(config.alerts, config.job.name, url) if config.alerts else None
    journal = JobJournal(database, about(config), sinks, gap=gap, watcher=alerts)
    service.started()
    return LeaderRuntime(service, journal, create_app(service, keys, journal, meter))


def _same_rules(state: LighthouseState, own: Agreement) -> None:
    """Raise ConfigError if this lighthouse has other rules than the replicas of its store agreed on."""
    if state.agreed is not None and state.agreed.rules and state.agreed.config_hash != own.config_hash:
        found = difference(dict(own.rules), dict(state.agreed.rules))
        if found is not None:
            how = ": go on with the version of ft_hsdp that began it" if found[0] == PROTOCOL else ""
            raise ConfigError(found[0], found[1], f"{found[2]}, on which this run has agreed{how}")


def _curves(config: Config, run: Path, database: SqliteDatabase) -> list[Sink]:
    curves: list[Sink] = []
    if config.lighthouse.tensorboard:
        curves.append(TensorBoardSink(run / "tensorboard", database))
    if config.lighthouse.wandb is not None:
        curves.append(WandbSink(config.lighthouse.wandb, config.job.name, run / "wandb", database))
    return curves


def policy(config: Config) -> Policy:
    quorum, timeouts = config.quorum, config.timeouts
    allowed = tuple(sorted(n for n in set(quorum.allowed) if n >= quorum.min_replicas))
    return Policy(
        slots=config.slots,
        steps=config.train.steps,
        replicas=config.replicas,
        min_replicas=min(allowed, default=quorum.min_replicas),
        suspect_grace_s=timeouts.suspect_grace_s,
        silence_grace_s=timeouts.silence_grace_s,
        evict_s=timeouts.evict_s,
        start_wait_s=timeouts.start_wait_s,
        final_wait_s=timeouts.final_wait_s,
        return_wait_s=timeouts.return_wait_s,
        on_lost_head=quorum.on_lost_head,
        edge_wait_s=timeouts.edge_wait_s,
        on_divergence=quorum.on_divergence,
        on_culprit=quorum.on_culprit,
        on_straggler=quorum.on_straggler,
        units=UnitPolicy(
            replicas=config.replicas,
            accumulate=config.train.accumulate,
            batch=quorum.batch,
            refill=quorum.refill or "next_step",
            allowed=allowed,
            max_accumulate=quorum.max_accumulate or _most_micro_batches(config),
            shared=config.data.assignment == "global",
            ranks_per_unit=config.ranks_per_unit,
            data_ranks=config.data_ranks,
        ),
        placing=PlacementPolicy(
            hosts=config.hosts.per_replica or 1,
            ranks=config.ranks_per_replica,
            restart=config.restart_policy,
            apart=config.memory.apart,
            place_s=timeouts.place_s,
            together_s=timeouts.together_s,
            start_s=timeouts.start_s,
            lease_s=quorum.lease_s,
            shrink_to=config.memory.shrink_to,
        ),
    )


def _most_micro_batches(config: Config) -> int:
    """Return how many micro-batches one replica of the fewest ranks trains for all the others in a step."""
    units = config.slots * config.train.accumulate * config.data_ranks
    return -(-units // (config.memory.shrink_to or config.data_ranks))


# The keys that the page shows.
SHOWN = (
    *("model.dim", "model.layers", "model.heads"),
    *("train.seed", "train.micro_batch", "train.accumulate", "train.seq_len", "train.device", "train.precision"),
    *("data.path", "optim.lr", "optim.weight_decay", "optim.clip", "lr.schedule", "lr.warmup", "lr.intervention"),
    *("quorum.batch", "quorum.min_replicas", "checkpoint.every", "spares"),
)


def about(config: Config, live: bool = True) -> JobInfo:
    """Return what the journal has to know of the job; ``live``: it is no finished run."""
    return JobInfo(
        config.job.name,
        config.slots,
        config.ranks_per_replica,
        config.train.steps,
        live=live,
        replicas=config.replicas,
        ranks_per_unit=config.ranks_per_unit,
        config={key: functools.reduce(getattr, key.split("."), config) for key in SHOWN},
    )

"""Reign: what a lighthouse is made of while it leads: decisions, the chronicle, curves, routes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from starlette.types import ASGIApp

from ft_hsdp.config import Config, agreed, config_hash
from ft_hsdp.core.replica_state import difference
from ft_hsdp.errors import ConfigError
from lighthouse.http.app import create_app
from lighthouse.http.auth import Keys
from lighthouse.http.metrics import Measured, Meter
from lighthouse.journal.database import Database
from lighthouse.journal.exporters import TensorBoardSink, WandbSink
from lighthouse.journal.journal import JobJournal, Sink
from lighthouse.overview.rows import JobInfo
from lighthouse.quorum.state import Agreement, LighthouseState, Policy
from lighthouse.service import Service
from lighthouse.store import Store
from lighthouse.validation import networks


class LeaderRuntime(NamedTuple):
    """From taking the lead to losing it; close the service, then the chronicle."""

    service: Service
    chronicle: JobJournal
    app: ASGIApp


def begin(
    config: Config,
    run: Path,
    keys: Keys,
    store: Store,
    archive: Database,
    gap: int,
    journal: Callable[[Mapping[str, object]], None],
) -> LeaderRuntime:
    """Lead the job in `run`, in a term of its own; `gap`: see `JobJournal`. Raises ConfigError."""
    state = store.load(policy(config))
    own = Agreement(config_hash(config), rules=tuple(agreed(config).items()))
    _same_rules(state, own)
    meter = Meter()
    chronicle = JobJournal(archive, about(config), (meter, *_curves(config, run, archive)), gap=gap)

    def tell(row: Mapping[str, object]) -> None:
        journal(row)
        chronicle.note((row,))

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
    service.started()
    return LeaderRuntime(service, chronicle, Measured(create_app(service, keys, chronicle, meter), meter))


def _same_rules(state: LighthouseState, own: Agreement) -> None:
    """Raise ConfigError where this lighthouse goes by other rules than the replicas agreed on with its store."""
    if state.agreed is not None and state.agreed.rules and state.agreed.config_hash != own.config_hash:
        found = difference(dict(own.rules), dict(state.agreed.rules))
        if found is not None:
            raise ConfigError(found[0], found[1], f"{found[2]}, on which this run has agreed")


def _curves(config: Config, run: Path, archive: Database) -> list[Sink]:
    """Who draws curves, as configured."""
    curves: list[Sink] = []
    if config.lighthouse.tensorboard:
        curves.append(TensorBoardSink(run / "tensorboard", archive))
    if config.lighthouse.wandb is not None:
        curves.append(WandbSink(config.lighthouse.wandb, config.job.name, run / "wandb", archive))
    return curves


def policy(config: Config) -> Policy:
    """What the operator chose, as the decisions want it."""
    quorum, timeouts = config.quorum, config.timeouts
    return Policy(
        slots=config.slots,
        steps=config.train.steps,
        replicas=config.replicas,
        min_replicas=quorum.min_replicas,
        suspect_grace_s=timeouts.suspect_grace_s,
        silence_grace_s=timeouts.silence_grace_s,
        evict_s=timeouts.evict_s,
        start_wait_s=timeouts.start_wait_s,
        final_wait_s=timeouts.final_wait_s,
        return_wait_s=timeouts.return_wait_s,
        supervisor_lease_s=timeouts.supervisor_lease_s,
        on_lost_head=quorum.on_lost_head,
        edge_wait_s=timeouts.edge_wait_s,
        on_divergence=quorum.on_divergence,
    )


def about(config: Config) -> JobInfo:
    """What the chronicle has to know of the job."""
    return JobInfo(
        config.job.name,
        config.slots,
        config.ranks_per_replica,
        config.train.steps,
        replicas=config.replicas,
    )

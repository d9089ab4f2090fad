"""Three crews train in turn on one network, block after block."""

from __future__ import annotations

import json
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ft_hsdp.bench.hsdp import crew as crews
from ft_hsdp.bench.hsdp.crew import Crew
from ft_hsdp.bench.hsdp.network import Network, unfit
from ft_hsdp.bench.hsdp.report import Block, report
from ft_hsdp.bench.hsdp.scene import Scene
from ft_hsdp.bench.plan import Log, Row
from ft_hsdp.bench.rounds import WARM_UP, interleave
from ft_hsdp.launch.run.directory import RunDir

CREWS = ("alone", "hsdp", "ft_hsdp")


def measure(scene: Scene, log: Log) -> list[Row]:
    """One row, see `report`; none, and a note, where there can be no such network.

    Raises Retryable where a process fails.
    """
    if why := unfit():
        log.note(f"link is left out: {why}")
        return []
    blocks: dict[str, list[Block]] = {name: [] for name in CREWS}
    with _unwinding(), ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ft-hsdp-bench-")))
        network = stack.enter_context(Network(scene.replicas, scene.rate, scene.congestion))
        run = crews.lighthouse(network, scene, folder, stack)
        team = [crews.start(name, name, n, network, scene, folder, stack) for n, name in enumerate(CREWS)]
        for crew in team:
            crew.ready()
        log.say(f"{scene.replicas} replicas of {scene.ranks} ranks, links of {scene.rate}: {', '.join(CREWS)}")
        turns = {crew.name: partial(_block, crew, network, scene.steps, blocks[crew.name]) for crew in team}
        interleave(turns, scene.rounds)
        commits = [_commits(run, replica)[WARM_UP * scene.steps :] for replica in range(scene.replicas)]
    counted = {name: each[WARM_UP:] for name, each in blocks.items()}
    return [report(scene, counted, commits)]


@contextmanager
def _unwinding() -> Iterator[None]:
    """SIGTERM unwinds as Ctrl-C does: a namespace would outlive us."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _block(crew: Crew, network: Network, steps: int, blocks: list[Block]) -> float:
    """Train a block of steps; seconds of a step."""
    cpu_s, sent = crew.cpu_s(), network.sent()
    seconds = crew.train(steps)
    went = [after - before for after, before in zip(network.sent(), sent, strict=True)]
    blocks.append(Block(seconds, max(went) / steps, (crew.cpu_s() - cpu_s) / steps))
    return seconds


def _commits(run: RunDir, replica: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.commits(replica).read_text().splitlines()]

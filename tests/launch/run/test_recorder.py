"""The recorder of a driver that looks while replicas never pause: what it keeps does not grow with the steps."""

from __future__ import annotations

from pathlib import Path

from ft_hsdp.bench.driver import REPLICAS, Logs
from ft_hsdp.config import parse
from ft_hsdp.launch.run.directory import RunDir
from ft_hsdp.launch.run.recorder import Recorder

LOOKS, STEPS = 40, 50  # steps between two looks; in all more than what one look may read ahead


def test_what_was_fed_is_read_as_far_as_the_commits_even_if_each_look_finds_commits(tmp_path: Path) -> None:
    run, config = RunDir(tmp_path / "job"), parse({"replicas": REPLICAS, "train": {"steps": LOOKS * STEPS}})
    for replica in range(REPLICAS):
        run.replica(replica).mkdir(parents=True)
    logs, recorder = Logs(run, config), Recorder(run, config, lambda _: None, lambda _: None)
    awaited = []
    for look in range(LOOKS):
        logs.write(1 + look * STEPS, 1 + (look + 1) * STEPS)
        recorder.poll()
        awaited.append(recorder.awaited)
    recorder.close()
    logs.close()
    assert max(awaited) <= REPLICAS * STEPS, "lines of what was fed lag behind the commits"

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ft_hsdp.config import Config, dump, parse
from ft_hsdp.jsonl import LineWriter, replace_json
from ft_hsdp.launch import cli
from ft_hsdp.launch.run.directory import Row, RunDir
from ft_hsdp.launch.run.recorder import Recorder, logged_of
from ft_hsdp.launch.run.verify import verify
from ft_hsdp.lifetime import identity
from tests.support.launch.launch_rows import commit, event, fed, written
from tests.support.refused import refused

STEPS = 12
CONFIG = parse({"replicas": 3, "ranks_per_replica": 1, "train": {"steps": STEPS}})
ALL = {"0": "contribute", "1": "contribute", "2": "contribute"}


def record(run: RunDir, config: Config = CONFIG) -> None:
    """Write metrics.jsonl and summary.json of what the replicas have logged."""
    recorder = Recorder(run, config, lambda _: None, lambda _: None)
    recorder.finish()
    recorder.close()


def leave(
    run: RunDir, config: Config, grants: list[tuple[int, Row]], rows: list[Row], life: dict[int, int]
) -> None:
    """Write down what a job leaves behind: its grants by base, and commits in incarnations by epoch."""
    run.path.mkdir()
    run.config.write_text(dump(config))
    log = LineWriter(run.lighthouse_events)
    log.write(event("LighthouseStarted", 999.0, term=7))
    for epoch, (base, told) in enumerate(grants, 1):
        at = [epoch - 1, base, f"L{base}"]
        log.write(event("EpochGranted", 1000.0 + base, epoch=epoch, term=7, base=at, **told))
    for replica, lines in fed(rows).items():
        commits, feeds = LineWriter(run.commits(replica)), LineWriter(run.fed(replica))
        for row in rows:
            if replica in row["contributors"]:
                commits.write({**row, "incarnation": f"{replica}-a-{life[row['epoch']]}"})
        for line in lines:
            feeds.write(line)
        final = {"step": STEPS, "commit_epoch": 3, "lineage": f"L{STEPS}", "digest": "d", "incarnation": "x"}
        replace_json(run.final(replica), final)
    record(run, config)


def copied(model: str) -> Any:
    """A fixture: a copy of what another one left behind, to be changed."""

    @pytest.fixture
    def copy(request: pytest.FixtureRequest, tmp_path: Path) -> RunDir:
        shutil.copytree(request.getfixturevalue(model), tmp_path / "job")
        return RunDir(tmp_path / "job")

    return copy


run, narrow = copied("model"), copied("narrow_model")


def epochs(count: int) -> Iterator[tuple[int, int, list[int]]]:
    """Each step of one of three epochs, which begin with steps 1, 5 and 9, and where its data shards are."""
    indices = [0] * count
    for step in range(1, STEPS + 1):
        yield step, (step + 3) // 4, indices


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a job of three replicas leaves behind; replica 1 was away from step 5 to step 8."""
    run = RunDir(tmp_path_factory.mktemp("model") / "job")
    rows = []
    for step, epoch, indices in epochs(3):
        row = commit(
            step, who=(0, 2) if epoch == 2 else (0, 1, 2), epoch=epoch, ring=[0, 2] if epoch == 2 else [0, 1, 2]
        )
        for c in row["contributions"]:
            c["index"] = indices[c["shard"]]
            indices[c["shard"]] += 1
        rows.append({**row, "cursors": list(indices)})
    grants = [
        (base, {"members": members, "roles": {r: role for r, role in ALL.items() if int(r) in members}})
        for base, members in ((0, [0, 1, 2]), (4, [0, 2]), (8, [0, 1, 2]))
    ]
    leave(run, CONFIG, grants, rows, {1: 0, 2: 0, 3: 1})
    return run.path


NARROW = parse(
    {"replicas": 2, "ranks_per_replica": 2, "hosts": {"per_replica": 2}, "memory": {"shrink_to": 1}}
    | {"train": {"steps": STEPS}}
)


@pytest.fixture(scope="module")
def narrow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a job of two replicas of two ranks leaves behind; replica 1 had one rank in epoch 2, both later."""
    run = RunDir(tmp_path_factory.mktemp("narrow") / "job")
    ranks = {1: {0: 2, 1: 2}, 2: {0: 2, 1: 1}, 3: {0: 1, 1: 1}}
    grants = []
    for epoch, base in ((1, 0), (2, 4), (3, 8)):
        known = {1: {}, **ranks}[epoch - 1] if epoch > 1 else {}
        hosts = {
            str(r): [[f"r{r}h{k}", 1] for k in range(n)] for r, n in ranks[epoch].items() if known.get(r) != n
        }
        roles = {"0": "contribute", "1": "contribute"}
        grants.append((base, {"members": [0, 1], "roles": roles, "hosts": hosts}))
    rows = []
    for step, epoch, indices in epochs(2):
        unequal: dict[str, Any] = {"ring_widths": list(ranks[epoch].values())} if epoch == 2 else {}
        row = commit(step, who=(0, 1), epoch=epoch, ring=[0, 1], units_wanted=4, ranks=2, **unequal)
        for c in row["contributions"]:
            width = ranks[epoch][c["replica"]]
            c.update(width=width % 2, units=width, index=indices[c["shard"]])
            indices[c["shard"]] += width
        rows.append({**row, "units": sum(ranks[epoch].values()), "cursors": list(indices)})
    leave(run, NARROW, grants, rows, {1: 1, 2: 2, 3: 3})
    return run.path


def edit(path: Path, line: int, change: Callable[[Row], Any]) -> None:
    lines = path.read_text().splitlines()
    row = json.loads(lines[line - 1])
    change(row)
    lines[line - 1] = json.dumps(row)
    path.write_text("".join(f"{each}\n" for each in lines))


def insert(path: Path, line: int, *new: Row) -> None:
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[: line - 1], *(f"{json.dumps(row)}\n" for row in new), *lines[line - 1 :]]))


def drop(path: Path, line: int) -> None:
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[: line - 1] + lines[line:]))


def broken(run: RunDir) -> None:
    """Steps 3 and 4 were made again in epoch 2, and metrics.jsonl tells those of epoch 1."""
    ring: dict[str, Any] = {"who": (0, 2), "epoch": 2, "ring": [0, 2]}
    again = [commit(3, lineage="X3", prev="L2", **ring), commit(4, lineage="X4", prev="X3", **ring)]
    for replica in (0, 2):
        edit(run.commits(replica), 5, lambda row: row.update(prev="X4"))
        insert(run.commits(replica), 5, *({**row, "incarnation": f"{replica}-a-0"} for row in again))
    edit(run.lighthouse_events, 3, lambda row: row.update(base=[1, 2, "L2"]))


def killed_within(run: RunDir) -> None:
    """All wrote step 5 down, and died before they had applied it; replica 2 wrote step 4 down twice."""
    for replica in (0, 1, 2):
        insert(run.commits(replica), 5, commit(5, lineage="X5", prev="L4", incarnation=f"{replica}-a-0"))
    insert(run.commits(2), 5, json.loads(run.commits(2).read_text().splitlines()[3]))


def older_store(run: RunDir) -> None:
    """A lighthouse found an older copy of its store, twice; members told it so, and it took terms of its own."""
    behind = [event("LighthouseStarted", 1004.0, term=7), event("StoreBehind", 1004.1, epoch=1, term=7)]
    insert(run.lighthouse_events, 3, *behind)
    edit(run.lighthouse_events, 5, lambda row: row.update(term=8))
    edit(run.lighthouse_events, 6, lambda row: row.update(term=8))


def late_line(run: RunDir) -> None:
    """The lighthouse that led before wrote its last grant down only after the next one had begun."""
    insert(run.lighthouse_events, 3, event("LighthouseStarted", 1004.0, term=8))
    edit(run.lighthouse_events, 5, lambda row: row.update(term=8))
    moved = run.lighthouse_events.read_text().splitlines(keepends=True)
    run.lighthouse_events.write_text("".join([*moved[:3], moved[4], moved[3]]))


def order_of_its_own(run: RunDir) -> None:
    """Two replicas that cannot connect to each other are put apart."""
    edit(run.lighthouse_events, 4, lambda row: row.update(members=[0, 2, 1]))
    for replica in range(3):
        for line in range(5, len(run.commits(replica).read_text().splitlines()) + 1):
            edit(run.commits(replica), line, lambda row: row.update(ring=[0, 2, 1]) if row["epoch"] == 3 else None)


def left_for_good(run: RunDir) -> None:
    """The script of replica 0 had ended its part before."""
    of = {"step": 5, "commit_epoch": 2, "lineage": "L5", "digest": "d", "incarnation": "x", "of_job": False}
    stopped(run, {0: of})


def stopped(run: RunDir, finals: dict[int, Row] | None = None) -> None:
    """It was told to stop: no replica holds the last step of the configuration."""
    for replica in range(3):
        run.final(replica).unlink()
    for replica, final in (finals or {}).items():
        replace_json(run.final(replica), final)
    run.metrics.unlink()
    record(run)


def not_recorded_to_its_end(run: RunDir) -> None:
    """It was stopped, and its lighthouse was started by itself; or the process that merges its logs was killed."""
    stopped(run)
    run.summary.unlink()
    drop(run.metrics, STEPS)


LEGAL: dict[str, Callable[[RunDir], None]] = {
    "all died before they applied": killed_within,
    "an older store": older_store,
    "a late line": late_line,
    "a ring that is not by number": order_of_its_own,
    "it was stopped": stopped,
    "one had left before it was stopped": left_for_good,
    "it has no summary": not_recorded_to_its_end,
}


@pytest.mark.parametrize("what", LEGAL)
def test_what_the_protocol_allows_is_no_breach(run: RunDir, what: str) -> None:
    LEGAL[what](run)
    assert verify(run).breaches == []


def test_a_run_that_is_well_passes(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    found = verify(run)
    assert (found.breaches, found.steps, found.grants) == ([], STEPS, 3)
    assert cli.main(["verify", str(run.path)]) == 0
    assert capsys.readouterr().out == f"{STEPS} steps, 3 grants: no breach\n"


def test_a_run_whose_lighthouse_runs_has_ended_only_if_there_is_a_summary(run: RunDir) -> None:
    replace_json(run.lighthouse, identity(os.getppid()))
    assert verify(run).breaches == []
    run.summary.unlink()
    refused(lambda: verify(run), key="run")


def test_a_run_that_went_back_by_several_steps_passes(tmp_path: Path) -> None:
    """Its files hold the history that lasted, with the batches of that alone, though others were told before."""
    run = RunDir(tmp_path / "job")
    run.path.mkdir()
    run.config.write_text(dump(CONFIG))
    log = LineWriter(run.lighthouse_events)
    log.write(event("LighthouseStarted", 999.0, term=7))
    log.write(event("EpochGranted", 999.5, epoch=1, members=[0, 1, 2], roles=ALL, base=[0, 0, ""]))
    told: list[int] = []
    recorder = Recorder(run, CONFIG, lambda row: told.append(row["step"]), lambda _: None)
    commits = [LineWriter(run.commits(replica)) for replica in range(3)]
    feeds = [LineWriter(run.fed(replica)) for replica in range(3)]

    def write(rows: list[Row], life: int) -> None:
        for replica, lines in fed(rows).items():
            for line in lines:
                feeds[replica].write({**line, "incarnation": f"{replica}-a-{life}"})
        for row in rows:
            for replica in row["contributors"]:
                commits[replica].write({**row, "incarnation": f"{replica}-a-{life}"})
            recorder.poll()

    write([commit(n) for n in range(1, 9)], 0)
    assert told == [1, 2, 3, 4, 5, 6, 7]
    log.write(event("HeadRolledBack", 1010.0, steps=3))
    roles = {"0": "contribute", "1": "contribute"}
    log.write(event("EpochGranted", 1010.0, epoch=2, members=[0, 1], roles=roles, base=[1, 5, "L5"]))
    after: dict[str, Any] = {"who": (0, 1), "epoch": 2, "ring": [0, 1]}
    lasting = [
        commit(n, lineage=f"R{n}", prev="L5" if n == 6 else f"R{n - 1}", t=1010.0 + n, cursors=[n, n, 5], **after)
        for n in range(6, STEPS + 1)
    ]
    write(lasting, 1)
    for replica in (0, 1):
        final = {"step": STEPS, "commit_epoch": 2, "lineage": f"R{STEPS}", "digest": "d", "incarnation": "x"}
        replace_json(run.final(replica), final)
    summary = recorder.finish()
    recorder.close()
    assert told == [*range(1, 8), *range(6, STEPS + 1)], "what was told is not told again, what took its place is"
    metrics = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [row["lineage"] for row in metrics] == [
        *(f"L{n}" for n in range(1, 6)),
        *(row["lineage"] for row in lasting),
    ]
    assert summary["steps"] == STEPS
    assert summary["batches"] == {"trained": 3 * 5 + 2 * 7, "duplicated": 0, "skipped": 0}
    assert summary["tokens"] == 100 * STEPS
    assert verify(run).breaches == []


def said(file: str, line: int, **values: Any) -> Callable[[RunDir], None]:
    """A line of a file, which may be that of a replica, has other values."""
    name, _, replica = file.partition(" ")

    def plant(run: RunDir) -> None:
        found = getattr(run, name)
        edit(found(int(replica)) if replica else found, line, lambda row: row.update(values))

    return plant


PLANTED: dict[str, tuple[Callable[[RunDir], None], str]] = {
    "an epoch falls": (said("lighthouse_events", 3, epoch=1), "a higher epoch"),
    "a member twice": (said("lighthouse_events", 2, members=[0, 1, 2, 0]), "at most once"),
    "a base of nobody": (said("lighthouse_events", 4, base=[2, 8, "X"]), "was committed"),
    "a term again": (
        lambda r: insert(r.lighthouse_events, 3, event("LighthouseStarted", 1.0, term=7)),
        "a term of its own",
    ),
    "a guest in the ring": (said("commits 0", 5, ring=[0, 1, 2]), "of the members [0, 2]"),
    "an epoch of nobody": (said("commits 0", 5, epoch=9), "that was granted"),
    "who was behind": (said("lighthouse_events", 4, roles={**ALL, "1": "behind"}), "to contribute"),
    "units that no contribution has": (said("commits 0", 5, units=9), "units 9; expected: 2, by its"),
    "units that were not wanted": (said("lighthouse_events", 3, units_wanted=12), "units_wanted 3; expected: 12"),
    "two tell one step apart": (said("commits 2", 3, digest="e"), "for this lineage"),
    "two lineages": (said("commits 2", 12, lineage="X"), "one commit"),
    "a broken chain": (said("commits 0", 3, prev="X"), "which it committed before"),
    "a break of the whole chain": (broken, "step 3, lineage X3, as the replicas have"),
    "a line of nobody": (
        said("metrics", 12, lineage="X"),
        "lineage X; expected: step 12, lineage L12, as the replicas have",
    ),
    "the last line": (lambda r: drop(r.metrics, STEPS), "the end; expected: step 12"),
    "another configuration of a lighthouse": (said("lighthouse_events", 1, config_hash="X"), "of config.yaml"),
    "another configuration of a replica": (said("final 2", 1, config_hash="X"), "of config.yaml"),
    "a batch that nobody fed": (lambda r: drop(r.fed(1), 3), "each exactly once"),
    "another digest at the end": (said("final 1", 1, digest="e"), "at the same state"),
    "no summary of a job that has ended": (
        lambda r: (r.summary.unlink(), written(r.events, event("JobFinished", 1013.0))),
        "the figures of the run",
    ),
    "a figure of the summary": (said("summary", 1, tokens=1), "by the logs"),
    "a step of metrics": (lambda r: drop(r.metrics, 4), "step 4, lineage L4, as the replicas have"),
    "NaN": (said("metrics", 4, loss=float("nan")), "no strict JSON"),
}


def both(change: Callable[[Row], Any], line: int = 6) -> Callable[[RunDir], None]:
    """Change a step in the logs of both replicas."""

    def plant(run: RunDir) -> None:
        for replica in (0, 1):
            edit(run.commits(replica), line, change)

    return plant


OF_WIDTHS: dict[str, tuple[Callable[[RunDir], None], str]] = {
    "two tell other widths": (
        said("commits 1", 6, ring_widths=[1, 2]),
        "ring_widths [1, 2]; expected: [2, 1], as replicas/0/commits.jsonl:6 has for this lineage",
    ),
    "one tells no widths": (
        lambda r: edit(r.commits(1), 6, lambda x: x.pop("ring_widths")),
        "ring_widths None; expected: [2, 1]",
    ),
    "a contribution by more ranks": (
        both(lambda x: x["contributions"][1].update(width=0)),
        "a contribution of replica 1 by 2 ranks; expected: 1, by ring_widths",
    ),
    "a contribution by fewer ranks": (
        both(lambda x: x["contributions"][0].update(width=1)),
        "a contribution of replica 0 by 1 ranks; expected: 2, by ring_widths",
    ),
    "a narrow contribution among equal ones": (
        both(lambda x: x["contributions"][1].update(width=1), line=2),
        "a contribution of replica 1 by 1 ranks; expected: 2, as there are no ring_widths",
    ),
    "widths of some": (both(lambda x: x.update(ring_widths=[2])), "one for each member of the ring [0, 1]"),
    "widths that are equal": (both(lambda x: x.update(ring_widths=[2, 2])), "unequal ones"),
    "other widths than were granted": (
        both(lambda x: (x.update(ring_widths=[2, 3]), x["contributions"][1].update(width=3))),
        "ranks {0: 2, 1: 3}; expected: {1: 1}, as lighthouse/events.jsonl:3 has",
    ),
    "all wider than was granted": (
        both(lambda x: [c.update(width=0) for c in x["contributions"]], line=10),
        "ranks {0: 2, 1: 2}; expected: {0: 1}, as lighthouse/events.jsonl:4 has",
    ),
    "steps of fewer ranks": (
        said("summary", 1, narrow_steps={"1": 9}),
        "narrow_steps {'1': 9}; expected: {'1': 8}, by the logs",
    ),
    "no steps of fewer ranks": (
        lambda r: edit(r.summary, 1, lambda x: x.pop("narrow_steps")),
        "narrow_steps None",
    ),
}


def test_steps_of_fewer_ranks_are_no_breach(narrow: RunDir) -> None:
    found = verify(narrow)
    assert (found.breaches, found.steps, found.grants) == ([], STEPS, 3)
    assert json.loads(narrow.summary.read_text())["narrow_steps"] == {"1": 8}


@pytest.mark.parametrize("kind", [*PLANTED, *OF_WIDTHS])
def test_each_breach_is_found(request: pytest.FixtureRequest, kind: str) -> None:
    run = request.getfixturevalue("narrow" if kind in OF_WIDTHS else "run")
    plant, told = PLANTED.get(kind) or OF_WIDTHS[kind]
    plant(run)
    found = verify(run)
    assert any(told in breach for breach in found.breaches), found.breaches


def test_what_a_full_disk_cost_is_not_held_against_a_run(run: RunDir) -> None:
    drop(run.fed(1), 3)
    lost = event("LogLinesLost", 1003.5, file="fed.jsonl", lines=1, since=1002.0, replica=1)
    written(run.events, lost)
    found = verify(run)
    assert (found.breaches, found.lost) == ([], 1)
    assert any("lost lines" in line for line in found.lines)


def test_lines_that_one_replica_lost_are_those_that_others_have(run: RunDir) -> None:
    for _ in range(4, 10):  # more than the steps for which a merger waits for a row
        drop(run.commits(0), 4)
    lost = event("LogLinesLost", 1009.5, file="commits.jsonl", lines=6, since=1004.0, replica=0)
    insert(run.events, 1, lost)
    found = verify(run)
    assert (found.steps, found.breaches) == (STEPS, [])


def test_a_breach_ends_the_command_with_1(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    edit(run.summary, 1, lambda row: row.update(tokens=1))
    assert cli.main(["verify", "--json", str(run.path)]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["ok"], len(told["breaches"])) == (False, 1)
    assert cli.main(["verify", str(run.path)]) == 1
    assert capsys.readouterr().out.endswith(" grants: 1 breach\n")


def test_logged_values_stand_in_the_metrics_once_and_not_of_steps_that_did_not_last(run: RunDir) -> None:
    def row(step: int, epoch: int, **values: float) -> Row:
        return {"t": 1000.0 + step, "step": step, "epoch": epoch, "values": values, "incarnation": "0-a-0"}

    broken(run)
    told = (row(2, 1, a=0.5), row(4, 1, a=1.0), row(4, 2, a=2.0), row(STEPS, 3, a=3.0))
    written(run.logged(0), *told, {"step": "none"})
    for replica in (0, 1):  # an evaluation of each
        written(run.logged(replica), row(STEPS, 3, eval_loss=4.0) | {"lineage": "ab"})
    run.metrics.unlink()
    record(run)
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    steps = [line["step"] for line in lines if "logged" not in line]
    assert steps == list(range(1, STEPS + 1))
    assert [(line["step"], line["logged"]) for line in lines if "logged" in line] == [
        (2, {"a": 0.5}),
        (4, {"a": 2.0}),
        (STEPS, {"a": 3.0}),
        (STEPS, {"eval_loss": 4.0}),
    ]
    assert sum("eval_loss" in row["values"] for row in logged_of(run)) == 1
    assert not any("metrics" in breach for breach in verify(run).breaches)


def test_incarnations_that_trained_on_other_data_are_found(run: RunDir) -> None:
    for replica, length in enumerate(("160", "160", "159")):
        facts = {"length": length, "sample 0": "random" if replica else "ab"}
        row = event("FirstStepCommitted", 1001.0, source="replica", replica=replica, step=1, data=facts)
        written(run.events, row)
    (breach,) = verify(run).breaches
    assert breach.startswith("events.jsonl:")
    assert "length 159; expected: 160" in breach

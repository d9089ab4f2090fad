import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import psutil
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp import fault_injection
from ft_hsdp.analysis.failures import AFTERMATH_S
from ft_hsdp.config import ChaosConfig, parse
from ft_hsdp.errors import ConfigError
from ft_hsdp.jsonl import replace_json
from ft_hsdp.launch.chaos import Injection, Planner, in_words
from ft_hsdp.launch.injection import inflict, inject_by_hand, parse_options
from ft_hsdp.launch.job import JobRun
from ft_hsdp.launch.run.directory import RunDir, read_jsonl
from tests.support.launch.launch_rows import failures
from tests.support.refused import refused

ALL = (0, 1, 2)


def planner(*rules: dict[str, Any], ranks: int = 2) -> Planner:
    return Planner([ChaosConfig.model_validate(rule) for rule in rules], ranks)


def test_a_step_is_hit_once_while_it_is_in_flight() -> None:
    plan = planner({"at_step": 5, "replicas": (1,), "rank": 1, "down_steps": 3})
    assert plan.due(3, 0.0, ALL) == []
    assert plan.due(4, 0.1, ALL) == [Injection(1, 1, "KILL", 3, 0.0, "chaos at step 5")]
    assert plan.due(5, 0.2, ALL) == []
    assert len(planner({"at_step": 1, "replicas": (0,)}).due(0, 0.0, ALL)) == 1, "before anything is committed"


def test_all_replicas_of_a_rule_are_hit_and_one_that_is_down_when_it_runs() -> None:
    plan = planner({"at_step": 2, "replicas": (0, 2), "signal": "STOP", "for_s": 4.0})
    assert [i.replica for i in plan.due(7, 0.0, (1, 2))] == [2]
    assert plan.due(8, 0.0, (1, 2)) == []
    assert plan.due(9, 0.0, ALL) == [Injection(0, 0, "STOP", 0, 4.0, "chaos at step 2")]


def test_a_rate_starts_with_the_first_commit_and_is_kept_on_average() -> None:
    plan = planner({"rate_per_min": 60, "replicas": ALL, "seed": 3})
    assert plan.due(0, 1e6, ALL) == []
    made = [i for t in range(10_000) for i in plan.due(1, t / 10, ALL)]
    assert 850 < len(made) < 1150
    assert {i.replica for i in made} == {0, 1, 2}
    assert {i.rank for i in made} == {0, 1}


@given(st.integers(0, 2**32), st.lists(st.floats(0.01, 5.0), max_size=30))
def test_equal_seeds_plan_equal_failures(seed: int, waits: list[float]) -> None:
    rule = {"rate_per_min": 120, "replicas": (0, 2), "seed": seed, "rank": 1}
    one, two, now = planner(rule), planner(rule), 0.0
    for wait in waits:
        now += wait
        due = one.due(1, now, (0, 1))
        assert due == two.due(1, now, (0, 1))
        assert all((i.replica, i.rank) == (0, 1) for i in due)
        assert len(due) <= 1


EVERY: list[tuple[dict[str, Any], str]] = [  # one rule of each kind, and what it does in words
    ({"replicas": (1,), "signal": "STOP", "for_s": 2.0}, "replica 1 rank 0 gets SIGSTOP for 2 s"),
    (
        {"kind": "host", "host": "r1h0", "replicas": (1,), "for_s": 2.0},
        "host r1h0 of replica 1, its ranks and its state agent are lost for 2 s",
    ),
    ({"kind": "helper", "target": "fork_server"}, "the fork server gets SIGKILL"),
    ({"kind": "helper", "target": "agent", "replicas": (1,)}, "the state agent of replica 1 gets SIGKILL"),
    ({"kind": "partition", "edge": [0, 2]}, "nothing passes between replica 0 and replica 2"),
    (
        {"kind": "partition", "edge": [1, "lighthouse"], "reject": True},
        "nothing passes between replica 1 and the lighthouse, connections are refused",
    ),
    ({"kind": "reset", "replicas": (1,)}, "the connections of replica 1 to its neighbours are reset"),
    ({"kind": "flip", "replicas": (1,)}, "a byte of a snapshot of replica 1 flips"),
]


@pytest.mark.parametrize(("rule", "said"), EVERY, ids=[rule.get("kind", "signal") for rule, _ in EVERY])
def test_each_kind_is_due_once_at_its_time(rule: dict[str, Any], said: str) -> None:
    plan = planner({"at_s": 3.0, **rule})
    assert plan.due(0, 50.0, ALL) == []
    assert plan.due(1, 100.0, ALL) == []
    assert plan.due(9, 102.9, ALL) == []
    (made,) = plan.due(9, 103.0, ALL)
    assert in_words(made) == said
    assert made.reason == "chaos at 3 s"
    assert plan.due(9, 200.0, ALL) == []


def test_each_kind_is_planned_here_and_has_a_row_on_the_page_whose_example_is_taken() -> None:
    page = (Path(__file__).parents[2] / "docs/chaos.md").read_text()
    kinds = get_args(ChaosConfig.model_fields["kind"].annotation)
    assert {rule.get("kind", "signal") for rule, _ in EVERY} == set(kinds)
    assert [kind for kind in kinds if f"\n| `{kind}` |" not in page] == []
    example = page.partition("```yaml\n")[2].partition("```")[0]
    assert len(parse(yaml.safe_load(example)).chaos) == 4


def test_a_host_of_a_replica_that_is_away_is_hit_when_it_is_back() -> None:
    plan = planner({"kind": "host", "at_step": 5, "host": "r0h1", "replicas": (0, 2)})
    assert [i.replica for i in plan.due(4, 0.0, (1, 2))] == [2]
    assert plan.due(5, 0.1, (1, 2)) == []
    assert [i.replica for i in plan.due(6, 0.2, ALL)] == [0]
    assert plan.due(7, 0.3, ALL) == []
    of_all = planner({"kind": "host", "at_step": 5, "host": "r0h1"})
    assert of_all.due(4, 0.0, ()) == []
    assert [i.replica for i in of_all.due(5, 0.1, (0, 1))] == [0, 1]
    assert of_all.due(6, 0.2, ALL) == [], "those that were there were hit at once"


def test_a_rule_that_hit_nothing_is_named() -> None:
    plan = planner({"at_step": 5, "replicas": (0,)}, {"kind": "host", "at_s": 2.5, "host": "r9h9"})
    (made,) = plan.due(4, 0.0, ALL)
    assert made.rule == 0
    (said,) = plan.idle({made.rule})
    assert said.startswith("chaos.1 ")
    assert plan.idle({0, 1}) == []
    often = planner({"rate_per_min": 60, "replicas": ALL})
    assert {i.rule for t in range(100) for i in often.due(1, t / 10, ALL)} == {0}
    assert len(often.idle(())) == 1


def test_without_a_name_the_host_of_a_rank_is_hit() -> None:
    (made,) = planner({"kind": "host", "at_step": 2, "replicas": (1,), "rank": 1}).due(5, 0.0, ALL)
    assert (made.replica, made.rank, made.host) == (1, 1, None)


def test_an_edge_fails_at_a_rate() -> None:
    plan = planner({"kind": "partition", "edge": [0, 1], "rate_per_min": 60, "for_s": 1})
    made = [i for t in range(1000) for i in plan.due(1, t / 10, ())]
    assert 60 < len(made) < 140
    assert {(i.edge, i.replica, i.rank) for i in made} == {((0, 1), None, None)}


@pytest.mark.parametrize(
    ("said", "option"),
    [
        ({"replica": 0, "kind": "fire"}, "--kind"),
        ({"replica": 0, "kind": "clock"}, r"--kind: got 'clock'.* preload: \[tests\.support\.os_faults\]"),
        ({"kind": "flip"}, "--replica: got"),
        ({"kind": "partition", "edge": [0, 0]}, "--edge"),
        ({"kind": "helper"}, "--target"),
        ({"replica": 0, "for_s": -1.0}, "--for-s"),
    ],
)
def test_options_that_do_not_fit_are_one_line(said: dict[str, Any], option: str) -> None:
    refused(lambda: parse_options(**said), option)


@pytest.fixture
def victim(run_dir: RunDir) -> Iterator[subprocess.Popen[bytes]]:
    """Rank 1 of replica 0."""
    with pretenders(run_dir, {1: "vm"}, []) as found:
        yield found["rank 1"]


def _list(run: RunDir, pid: int) -> None:
    ranks = [{"rank": 1, "pid": pid, "state": "running"}]
    replace_json(run.processes(0), {"replica": 0, "incarnation": "0-a-0", "restarts": 0, "ranks": ranks})


def test_by_hand_kills_the_listed_rank_and_records_it(run_dir: RunDir, victim: subprocess.Popen[bytes]) -> None:
    made = inject_by_hand(run_dir, parse_options(replica=0, rank=1))
    assert victim.wait(10) == -signal.SIGKILL
    assert read_jsonl(run_dir.injections(0)) == [made]
    assert (made["event"], made["pid"], made["incarnation"]) == ("FailureInjected", victim.pid, "0-a-0")


AGENT = "ft_hsdp.state.agent.server"


@contextmanager
def pretenders(
    run: RunDir, hosts: dict[int, str], agents: list[str]
) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Processes with the command lines of the ranks of replica 0 and of state agents, listed in the run's files.

    Args:
        run: The run.
        hosts: The host of each rank.
        agents: The hosts with an agent; "": the machine.
    """
    code = "import time; print(1, flush=True); time.sleep(60)"
    commands = {f"rank {rank}": [str(run.path)] for rank in hosts}
    for host in agents:
        commands[f"agent {host}"] = [AGENT, "--replica", "0", *(["--name", host] if host else [])]
    run.replica(0).mkdir(parents=True)
    with ExitStack() as stack:
        found = {}
        for name, arguments in commands.items():
            log = stack.enter_context((run.replica(0) / "agent.log").open("ab"))
            line = [sys.executable, "-c", code, *arguments]
            found[name] = stack.enter_context(subprocess.Popen(line, stdout=subprocess.PIPE, stderr=log))
            stack.callback(found[name].kill)
            assert found[name].stdout is not None
            found[name].stdout.readline()
        rows = [
            {"rank": r, "pid": found[f"rank {r}"].pid, "host": host, "machine": "vm", "state": "running"}
            for r, host in hosts.items()
        ]
        replace_json(run.processes(0), {"replica": 0, "incarnation": "0-a-0", "restarts": 0, "ranks": rows})
        yield found


def dead(found: dict[str, subprocess.Popen[bytes]], names: set[str]) -> None:
    """Fail unless just these of the processes were killed."""
    for name in names:
        assert found[name].wait(10) == -signal.SIGKILL
    assert {name for name, process in found.items() if process.poll() is not None} == names


def test_a_host_takes_its_ranks_and_its_agent_along_and_no_other(run_dir: RunDir) -> None:
    hosts = {0: "r0h0", 1: "r0h0", 2: "r0h1", 3: "r0h1"}
    with pretenders(run_dir, hosts, ["r0h0", "r0h1", ""]) as found:
        made = inflict(run_dir, parse_options(replica=0, kind="host", rank=3, for_s=60.0))
        dead(found, {"rank 2", "rank 3", "agent r0h1"})
        event = made.event
        assert (event["kind"], event["pid"], event["lives"]) == ("host", found["rank 2"].pid, ["0-a-0"])
        assert fault_injection.hosts_down(run_dir.path, 0) == ["r0h1"]
        assert fault_injection.hosts_down(run_dir.path, 1) == []
        made.lifted("over")
        assert fault_injection.hosts_down(run_dir.path, 0) == []
        dead(found, {"rank 2", "rank 3", "agent r0h1"})


def test_a_machine_that_stands_for_itself_is_a_host(run_dir: RunDir) -> None:
    with pretenders(run_dir, {0: "vm", 1: "vm"}, ["r0h1", ""]) as found:
        made = inject_by_hand(run_dir, parse_options(kind="host", host="vm", for_s=0.01))
        assert made["replica"] == 0
        dead(found, {"rank 0", "rank 1", "agent "})
        assert fault_injection.hosts_down(run_dir.path, 0) == []


def test_a_host_that_is_not_there_is_one_line_and_nothing_is_killed(run_dir: RunDir) -> None:
    with pretenders(run_dir, {0: "r0h0", 1: "r0h1"}, ["r0h0"]) as found:
        for options, line in (
            ({"replica": 0, "kind": "host", "host": "r0h2"}, "--host: got 'r0h2'.*'r0h0', 'r0h1'"),
            ({"kind": "host", "host": "r0h2"}, "--host: got 'r0h2'"),
            ({"replica": 0, "kind": "host", "rank": 2}, "--rank: got 2"),
            ({"replica": 0, "kind": "signal", "host": "r0h1"}, "--host: got 'r0h1'"),
        ):
            refused(lambda options=options: inject_by_hand(run_dir, parse_options(**options)), line)
        assert fault_injection.hosts_down(run_dir.path, 0) == []
        dead(found, set())
    refused(lambda: inflict(run_dir, parse_options(replica=0, kind="host", host="r0h1")), "with a rank that runs")


def test_by_hand_stop_is_lifted(run_dir: RunDir, victim: subprocess.Popen[bytes]) -> None:
    inject_by_hand(run_dir, parse_options(replica=0, rank=1, signal="STOP", for_s=0.05))
    assert psutil.Process(victim.pid).status() != psutil.STATUS_STOPPED
    assert [e["event"] for e in read_jsonl(run_dir.injections(0))] == ["FailureInjected", "FailureLifted"]


def test_a_process_carries_out_only_what_its_job_listens_for(run_dir: RunDir) -> None:
    run_dir.config.write_text("debug: {faults: false}")
    with pytest.raises(ConfigError, match=r"debug\.faults: true"):
        inject_by_hand(run_dir, parse_options(kind="partition", edge=[0, 1], for_s=0.01))


def test_a_lost_incarnation_stands_under_the_kind_of_its_failure(run_dir: RunDir) -> None:
    _list(run_dir, 1)
    inflicted = inflict(run_dir, parse_options(kind="reset", replica=0))
    made = inflicted.event
    ended = {"event": "ReplicaExited", "replica": 0, "incarnation": "0-a-0", "kind": "exit 75", "rank": 0}
    (failure,) = failures([], [made, {**ended, "t": made["t"] + 1.0}], 1.0)
    assert failure["kind"] == "reset"
    over = {**inflicted.lifted("over"), "t": made["t"] + 2.0}
    (failure,) = failures([], [made, over, {**ended, "t": over["t"] + AFTERMATH_S + 0.1}], 1.0)
    assert failure["kind"] == "exit 75", "it was over for long"


def test_by_hand_signals_nothing_that_is_not_the_runs(run_dir: RunDir, tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], cwd="/") as stranger:
        _list(run_dir, stranger.pid)
        refused(lambda: inject_by_hand(RunDir(run_dir.path), parse_options(replica=0, rank=1)), "is another one")
        assert stranger.poll() is None
        stranger.kill()
    refused(lambda: inject_by_hand(run_dir, parse_options(replica=0, rank=1)), "does not")
    refused(lambda: inject_by_hand(run_dir, parse_options(replica=0)), "--rank: got 0")
    refused(lambda: inject_by_hand(run_dir, parse_options(replica=5)), "--replica: got 5")
    refused(lambda: parse_options(replica=0, rank=1, for_s=3.0), "--for-s")
    assert json.loads(run_dir.processes(0).read_text())["ranks"][0]["rank"] == 1


def test_a_rank_that_a_narrow_replica_lacks_is_not_hit(run_dir: RunDir) -> None:
    """A rule knows `ranks_per_replica`; the replica goes on with two of four ranks (memory.shrink_to)."""
    (injection,) = planner({"at_step": 5, "replicas": (1,), "rank": 3}, ranks=4).due(5, 0.0, ALL)
    said: list[str] = []
    job = object.__new__(JobRun)
    job._replicas = SimpleNamespace(ranks=lambda _: ("1-a-0", {0: None, 1: None}))  # type: ignore[assignment]
    job._terminal = SimpleNamespace(say=lambda line, style: said.append(line))  # type: ignore[assignment]
    job._inject(injection)
    (line,) = said
    assert "no rank 3" in line

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ft_hsdp.analysis.costs import ASSUMED, Assumptions
from ft_hsdp.analysis.fewer_ranks import tensors
from ft_hsdp.analysis.plan import BOUNDS, plan
from ft_hsdp.analysis.plan_table import lines
from ft_hsdp.config import parse
from ft_hsdp.launch.cli import main

PAGE = Path(__file__).parents[2] / "docs/memory.md"
ONE_REPLICA = {"replicas": 1, "ranks_per_replica": 4, "hosts": {"per_replica": 4}}


def read(text: str) -> Any:
    """A document in JSON, its keys as attributes."""
    return json.loads(text, object_hook=lambda keys: SimpleNamespace(**keys))


def made(config: dict[str, Any], **options: Any) -> Any:
    return read(json.dumps(plan(parse({"job": {"name": "job"}, **config}), Assumptions(), **options)))


def test_each_host_of_one_replica_copies_another_one() -> None:
    found = made(ONE_REPLICA, size=1e6)
    assert (found.copies, found.protected, found.why) == (2, True, "")
    assert found.shards[1] == SimpleNamespace(rank=1, holders=["r0h1"], copies=["r0h0"])
    assert found.hosts[1] == SimpleNamespace(
        host="r0h1", replica=0, ranks=[1], copies=[[0, 0]], bytes=5 * 3_000_000
    )
    assert (found.state_bytes, found.shard_bytes, found.copied_bytes_per_step) == (12e6, 3e6, 12e6)
    assert found.copy_s == pytest.approx(3e6 / 12.5e9)
    assert [row.state_lost for row in found.with_copies.lost_hosts] == pytest.approx([0, 1 / 3, 1, 1])
    assert [row.state_lost for row in found.replicas_alone.lost_hosts] == [1, 1, 1, 1]
    assert found.with_copies.losses_per_month < found.replicas_alone.losses_per_month
    assert found.with_copies.hosts_until_loss == pytest.approx(8 / 3)  # ReStore's formula for 2 groups of 2
    assert found.replicas_alone.hosts_until_loss == 1


def test_the_only_host_is_not_protected() -> None:
    found = made({"replicas": 1})
    assert (found.copies, found.protected) == (1, False)
    assert "one host only" in found.why


def test_a_spare_host_keeps_nothing_before_it_is_called() -> None:
    found = made({"replicas": 1, "ranks_per_replica": 4, "hosts": {"per_replica": 2, "spare": 1}})
    assert found.hosts[2] == SimpleNamespace(host="s0", replica=None, ranks=[], copies=[], bytes=0)
    assert found.shards[3].copies == ["r0h0"]


def test_a_budget_bounds_what_a_host_keeps_for_others() -> None:
    config = {**ONE_REPLICA, "hosts": {"per_replica": 2}}
    enough, little = (made({**config, "memory": {"budget_gb": gb}}, size=1e6) for gb in (0.012, 0.0119))
    assert (enough.protected, enough.hosts[0].copies) == (True, [[0, 2], [0, 3]])
    assert (little.protected, little.hosts[0].copies) == (False, [[0, 2]])
    assert "room for 1" in little.why


def test_labels_say_in_which_rack_a_host_is() -> None:
    found = made({**ONE_REPLICA, "hosts": {"per_replica": 4, "labels": {"r0h[01]": "a/1", "*": "a/2"}}})
    assert [row.host for row in found.hosts] == ["a/1/r0h0", "a/1/r0h1", "a/2/r0h2", "a/2/r0h3"]
    assert found.replicas_alone.lost_domains.rack == SimpleNamespace(fatal=2, known=2)


def test_racks_that_are_not_known_protect_from_nothing_that_plan_knows() -> None:
    config = {"job": {"name": "job"}, "replicas": 1, "memory": {"apart": "rack", "copies": 2}}
    document = plan(parse(config), Assumptions(), hosts=2)
    assert document["protected"] is None
    assert "hosts.labels" in document["why"]
    assert document["why"] in lines(document)[3]
    assert made({**config, "hosts": {"labels": {"r0h0": "7", "r0h1": "8"}}}, hosts=2).protected
    narrow = made({**SHRINKS, "memory": {"shrink_to": 2, "apart": "zone"}}, size=1e6).fewer_ranks
    assert {row.protected for row in narrow.widths} == {None}


def test_gemini_and_deadpool_cost_a_lost_host() -> None:
    config = {**ONE_REPLICA, "checkpoint": {"every": 100}}
    found = made(config, size=10e9)  # 120 GB: 48 s to a checkpoint and back, 2.4 s for a host's 30 GB
    assert found.replicas_alone.wasted_s == pytest.approx(48 + 100 * 20 / 2 + 48)
    assert found.replicas_alone.failure_costs_s == pytest.approx(150 + 20 * 99 / 2)
    assert found.with_copies.wasted_s == pytest.approx(20 / 2 + 2.4)
    assert found.with_copies.failure_costs_s == pytest.approx(40 + 20, rel=1e-3)


def test_a_job_without_checkpoints_begins_again() -> None:
    found = made({**ONE_REPLICA, "train": {"steps": 1000}})
    assert found.assumptions.steps_between_checkpoints == 1000
    assert found.replicas_alone.failure_costs_s == pytest.approx(150 + 20 * 999 / 2)


SHRINKS = {"replicas": 2, "ranks_per_replica": 4, "hosts": {"per_replica": 4}, "memory": {"shrink_to": 2}}


def test_fewer_ranks_beside_the_wait_for_a_host() -> None:
    part = made(SHRINKS, size=1e6).fewer_ranks
    assert (part.units_per_s, part.units_per_s_without) == pytest.approx((8 / 20, 4 / 20))
    assert [(row.ranks, row.hosts, row.units_per_step) for row in part.widths] == [(3, 3, 7), (2, 2, 6)]
    assert [row.rank_bytes for row in part.widths] == [4_000_000, 6_000_000]
    assert [(row.copies, row.protected, row.without_rows) for row in part.widths] == [(2, True, 0)] * 2
    assert part.break_even_s == 60 + 40  # timeouts.place_s and a start
    at = {row.away_s: (row.units_lost_waiting, row.units_lost_shrinking) for row in part.away}
    assert at[100] == pytest.approx((28, 28))
    assert at[600] == pytest.approx((128, 28 + 500 * 0.05))
    assert made({**SHRINKS, "memory": {}}, size=1e6).fewer_ranks is None


def test_a_constant_batch_counts_whole_micro_batches() -> None:
    two_hosts = {**SHRINKS, "hosts": {"per_replica": 2}, "quorum": {"batch": "constant"}}
    part = made(two_hosts, size=1e6).fewer_ranks
    (row,) = part.widths  # 8 units: 4 by each replica, the narrow one in two micro-batches
    assert (row.ranks, row.units_per_step, row.step_s) == (2, 8, 40)
    assert row.units_per_s == part.units_per_s_without == pytest.approx(0.2)
    assert part.break_even_s is None
    finer = made({**two_hosts, "train": {"accumulate": 3}}, size=1e6).fewer_ranks
    assert (finer.widths[0].units_per_step, finer.break_even_s) == (24, 100)


def test_the_last_host_has_no_second_copy() -> None:
    part = made({**SHRINKS, "replicas": 1}, size=1e6).fewer_ranks
    assert (part.units_per_s_without, [row.copies for row in part.widths]) == (0, [2, 2])
    one = made({**SHRINKS, "replicas": 1, "hosts": {"per_replica": 2}}, size=1e6).fewer_ranks
    assert [(row.hosts, row.copies, row.protected) for row in one.widths] == [(1, 1, False)]


def test_the_built_in_model_has_these_shapes() -> None:
    from ft_hsdp.train.model import ModelArgs, Transformer

    config = parse({"model": {"layers": 1}})
    model = Transformer(ModelArgs.of(config.model, config.data.vocabulary, 8))
    assert {name: (tuple(p.shape), 4) for name, p in model.named_parameters()} == tensors(config)


def test_the_text_says_from_when_on_fewer_ranks_pay() -> None:
    text = lines(plan(parse({"job": {"name": "job"}, **SHRINKS}), Assumptions()))
    assert [line for line in text if "more than 100 s" in line and "timeouts.place_s" in line]


@pytest.fixture(autouse=True)
def _in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PAGE.parents[1])


def test_the_documented_command_counts_4096_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = [line for line in PAGE.read_text().splitlines() if " plan " in line and "4096" in line]
    words = shlex.split(command.removeprefix("python launcher.py "), comments=True)
    assert main([*words, "--json"]) == 0
    found = read(capsys.readouterr().out)
    assert (len(found.hosts), found.copies) == (4096, 4)
    assert found.with_copies.lost_hosts[3].state_lost == pytest.approx(1024 / (4096 * 4095 * 4094 * 4093 / 24))


def test_the_documented_transcript_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```console\n\$ python launcher.py (plan .*?)```", PAGE.read_text(), re.DOTALL)
    command, *shown = block.splitlines()
    assert main([*shlex.split(command)]) == 0
    assert capsys.readouterr().out.splitlines()[: len(shown)] == shown


@pytest.mark.parametrize("many", [0, 1])
@pytest.mark.parametrize("replicas", [1, 2])
def test_the_bounds_of_the_assumptions_have_figures(many: int, replicas: int) -> None:
    assumed = {name: next(b for unit, b in BOUNDS.items() if name.endswith(unit))[many] for name in ASSUMED}
    config = parse({"replicas": replicas, "memory": {"copies": 8}, "train": {"steps": 10**9}})
    document = plan(config, Assumptions(**assumed), hosts=64, size=1e15)
    json.dumps(document, allow_nan=False)
    assert (
        0 <= document["with_copies"]["effective_ratio"] <= document["with_copies"]["effective_ratio_renewal"] <= 1
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--hosts 3", "--hosts: got 3; allowed: a divisor of ranks_per_replica (4), or more than that"),
        ("--hosts 0", "--hosts: got 0; allowed: 1 to 16384"),
        ("--memory.copies=3 --hosts 2", "memory.copies: got 3; allowed: at most 2 here (3 copies on different"),
        ("--memory.budget_gb=0.001", "memory.budget_gb: got 0.001; allowed: 0.0165 or more: 2 of a shard of 7.9"),
        ("--parameters 0", "--parameters: got 0.0; allowed: 1 to 1e15"),
        ("--entry=train.py", "--parameters: got 'nothing'; allowed: a number of parameters: train.py makes"),
        ("--step-s 0", "--step-s: got 0.0; allowed: 1e-06 to 1e+09"),
        ("--step-s 1e308", "--step-s: got 1e+308; allowed: 1e-06 to 1e+09"),
        ("--replace-s 1e120", "--replace-s: got 1e+120; allowed: 1e-06 to 1e+09"),
        ("--host-failures-per-month -1", "--host-failures-per-month: got -1.0; allowed: 0, or 1e-09 to 100000"),
        ("--host-failures-per-month 1e200", "--host-failures-per-month: got 1e+200; allowed: 0, or 1e-09 to"),
        ("--network-gbps inf", "--network-gbps: got inf; allowed: 1e-06 to 1e+06"),
        ("--storage-gbps nan", "--storage-gbps: got nan; allowed: 1e-06 to 1e+06"),
        ("--replace-s soon", "argument --replace-s: invalid float value: 'soon'"),
    ],
)
def test_bad_input_gets_one_line(options, said, tmp_path, capsys) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("replicas: 1\nranks_per_replica: 4\n")
    assert main(["plan", str(file), *options.split()]) == 64
    shown = capsys.readouterr()
    assert shown.out == ""
    assert said in shown.err
    assert shown.err.count("\n") == 1

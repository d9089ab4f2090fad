import pwd
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp.config import Config, agreed, config_hash, dump, load, parse, public, resume_hash
from ft_hsdp.fault_injection import PLACES
from tests.support.refused import refused

ROOT = Path(__file__).parent.parent

HIT = {"at_step": 5, "replicas": [0]}
CUT = {"kind": "partition", "at_s": 1, "edge": [0, 1]}
AID = {"kind": "helper", "at_s": 1, "target": "agent"}

POINT = {"replicas": [0], "step": 1}
LOST = {"kind": "host", "at_step": 5, "host": "r0h0"}
NO_URLS = ("hooks/hunter2", "ftp://a/hunter2", "https:///hunter2", "https://a/hunter2 b")
TWO_HOSTS = {"ranks_per_replica": 2, "hosts": {"per_replica": 2, "spare": 1}}

# A document, the key that the message starts with, a part of what it says is allowed.
BAD: list[tuple[dict[Any, Any], str, str]] = [
    ({"no_such_key": 1}, "no_such_key", "there is no such key; the top level has job, replicas"),
    ({"replica": 3}, "replica", "did you mean replicas?"),
    ({"train": {"step": 3}}, "train.step", "did you mean train.steps?"),
    ({"steps": 3}, "steps", "did you mean train.steps?"),
    ({1: 2}, "1", "no such key"),
    ({"replicas": 0}, "replicas", "a whole number from 1 to 64"),
    ({"replicas": "3"}, "replicas", "a whole number from 1 to 64"),
    ({"replicas": True}, "replicas", "a whole number from 1 to 64"),
    ({"ranks_per_replica": 4, "ranks_per_unit": 3}, "ranks_per_unit", "a divisor of ranks_per_replica (4)"),
    ({"ranks_per_replica": 4, "hosts": {"per_replica": 3}}, "hosts.per_replica", "a divisor of ranks_per_replica"),
    (
        {"ranks_per_replica": 4, "hosts": {"per_replica": 2}, "memory": {"shrink_to": 3}},
        "memory.shrink_to",
        "1 to 2, the ranks of a replica without one of its 2 hosts, or null",
    ),
    (
        {"ranks_per_replica": 4, "ranks_per_unit": 2, "memory": {"shrink_to": 2}},
        "memory.shrink_to",
        "null with tensor parallelism (ranks_per_unit is 2)",
    ),
    ({"memory": {"shrink_to": 1}}, "memory.shrink_to", "null, unless hosts.per_replica is 2 or more"),
    ({"memory": {"wait_s": 60.0}}, "memory.wait_s", "less than ftar.timeout_s (60.0): the others would give up"),
    ({"memory": {"copies": 2}, "state": {"snapshot": "on_demand"}}, "memory.copies", "1 or null with state."),
    ({"hosts": {"labels": {"node*": "a/b/c"}}}, "hosts.labels.node*", "text that matches"),
    ({"hosts": {"labels": {7: "rack"}}}, "hosts.labels.7", "a key that is text: put it into quotes"),
    ({"train": None}, "train", "a mapping with the keys steps"),
    ({"job": {"name": "a/b"}}, "job.name", "text that matches ^[A-Za-z0-9._-]{1,64}$"),
    ({"job": {"name": "ab\n"}}, "job.name", "text that matches"),
    ({"job": {"name": ".."}}, "job.name", "a name that is not a folder's own"),
    ({"data": {"path": ""}}, "data.path", "text that is not empty"),
    ({"optim": {"lr": float("nan")}}, "optim.lr", "a number at most 10 and above 0"),
    ({"optim": {"betas": [0.9]}}, "optim.betas", "a list of 2, each a number at least 0 and below 1"),
    ({"optim": {"betas": [0.9, 1]}}, "optim.betas.1", "a number at least 0 and below 1"),
    ({"optim": {"clip": 0}}, "optim.clip", "a number above 0 or null"),
    ({"lr": {"intervention": "cubic"}}, "lr.intervention", "none, linear, sqrt"),
    ({"model": {"dim": 100, "heads": 3}}, "model.dim", "a multiple of model.heads (3)"),
    ({"model": {"dim": 9, "heads": 3}}, "model.dim", "an even width per head"),
    ({"model": {"heads": 6, "kv_heads": 4}}, "model.kv_heads", "a divisor of model.heads (6)"),
    ({"ftar": {"chunk_bytes": 100}}, "ftar.chunk_bytes", "4096"),
    ({"ftar": {"timeout_s": 2}}, "timeouts.connect_s", "at most ftar.timeout_s (2.0)"),
    ({"timeouts": {"silence_s": 6}}, "timeouts.silence_s", "at most timeouts.connect_s (5.0)"),
    ({"timeouts": {"silence_s": 5, "evict_s": 5}}, "timeouts.silence_s", "at most 0.5 x timeouts.evict_s (2.5)"),
    ({"timeouts": {"factor": 20}}, "timeouts.connect_s", "; timeouts.factor (20) is in these waits"),
    ({"timeouts": {"factor": 60}}, "timeouts.factor", "at most 48: no wait is longer than a day"),
    ({"quorum": {"min_replicas": 4}}, "quorum.min_replicas", "at most replicas (3)"),
    ({"quorum": {"allowed": [4, 8]}}, "quorum.allowed", "a value from quorum.min_replicas (1) to replicas (3)"),
    ({"quorum": {"refill": "same_step"}}, "quorum.refill", "null, unless quorum.batch is constant"),
    ({"quorum": {"max_accumulate": 4}}, "quorum.max_accumulate", "null, unless quorum.batch is constant"),
    (
        {"quorum": {"batch": "constant", "max_accumulate": 2}, "train": {"accumulate": 3}},
        "quorum.max_accumulate",
        "at least train.accumulate (3)",
    ),
    ({"entry": "train"}, "entry", "a script whose name ends in .py, module:function, or null"),
    ({"args": ["--lr"]}, "args", "nothing, unless entry names a script or a function"),
    ({"entry": "train.py", "args": [0.1]}, "args.0", "text"),
    ({"entry_digest": "ab" * 16}, "entry_digest", "nothing, unless entry names a script or a function"),
    ({"quorum": {"lease_s": 5}}, "timeouts.evict_s", "at most quorum.lease_s (5.0)"),
    ({"timeouts": {"load_s": 601}}, "timeouts.load_s", "at most 5 x timeouts.return_wait_s (600.0): a replica"),
    ({"timeouts": {"load_s": 601, "return_wait_s": 0}}, "timeouts.load_s", "at most 5 x timeouts.final_wait_s (6"),
    ({"timeouts": {"return_wait_s": 601}}, "timeouts.return_wait_s", "at most timeouts.load_s (600.0): the"),
    ({"timeouts": {"stop_s": 600}}, "timeouts.stop_s", "less than 5 x timeouts.return_wait_s (600.0): a replica"),
    (
        {"lighthouse": {"etcd": ["http://etcd"], "etcd_lease_s": 30}},
        "lighthouse.etcd_lease_s",
        "less than 0.05 x timeouts.load_s (30.0): a lighthouse leads only when",
    ),
    (
        {"lighthouse": {"etcd": ["http://etcd"], "etcd_lease_s": 20}, "quorum": {"lease_s": 20}},
        "lighthouse.etcd_lease_s",
        "less than quorum.lease_s (20.0): training must go on",
    ),
    ({"quorum": {"catchup_wait_s": 70}}, "quorum.catchup_wait_s", "less than ftar.timeout_s (60.0): the others"),
    ({"optim": {"offload": True}}, "optim.offload", "false with train.device cpu: all is in host memory there"),
    ({"chaos": {"at_step": 1}}, "chaos", "a list, each a mapping with the keys kind, at_step"),
    ({"chaos": [{"at_step": 1}]}, "chaos.0.replicas", "at least 1 item"),
    ({"chaos": [{"replicas": [0]}]}, "chaos.0.at_step", "exactly one of at_step, at_s, rate_per_min"),
    ({"chaos": [HIT | {"rate_per_min": 1}]}, "chaos.0.rate_per_min", "exactly one of"),
    ({"chaos": [HIT, HIT | {"replicas": [3]}]}, "chaos.1.replicas", "ids from 0 to 2"),
    ({"chaos": [HIT | {"replicas": [0, 0]}]}, "chaos.0.replicas", "each replica once"),
    ({"chaos": [HIT | {"rank": 2}]}, "chaos.0.rank", "0 to 1 (ranks_per_replica is 2)"),
    ({"chaos": [HIT | {"for_s": 1}]}, "chaos.0.for_s", "0 with signal KILL"),
    ({"chaos": [HIT | {"at_s": 1}]}, "chaos.0.at_s", "exactly one of"),
    ({"chaos": [HIT | {"kind": "disk_full"}]}, "chaos.0.kind", "preload: [tests.support.os_faults]"),
    ({"chaos": [{"at_s": 1, "kind": "partition"}]}, "chaos.0.edge", "[a, b] or [a, lighthouse]"),
    ({"chaos": [CUT | {"edge": [0, "moon"]}]}, "chaos.0.edge", "[a, lighthouse]"),
    ({"chaos": [CUT | {"edge": [2, 2]}]}, "chaos.0.edge", "two ends"),
    ({"chaos": [CUT | {"edge": [0, 3]}]}, "chaos.0.edge", "ids from 0 to 2"),
    ({"chaos": [CUT | {"replicas": [0]}]}, "chaos.0.replicas", "[] with an edge"),
    ({"chaos": [CUT | {"rank": 0}]}, "chaos.0.rank", "null with kind partition"),
    ({"chaos": [HIT | {"edge": [0, 1]}]}, "chaos.0.edge", "null with kind signal"),
    ({"chaos": [HIT | {"kind": "reset", "signal": "STOP"}]}, "chaos.0.signal", "only with signal and helper"),
    ({"chaos": [HIT | {"kind": "reset", "down_steps": 2}]}, "chaos.0.down_steps", "0 with kind reset"),
    ({"chaos": [HIT | {"kind": "flip", "for_s": 1}]}, "chaos.0.for_s", "0 with kind flip"),
    ({"chaos": [HIT | {"reject": True}]}, "chaos.0.reject", "false with kind signal"),
    ({"chaos": [HIT | {"host": "a", "rank": 1}]}, "chaos.0.host", "null with a target or a rank"),
    (TWO_HOSTS | {"chaos": [LOST | {"host": "nope"}]}, "chaos.0.host", "a host that there is: r<replica>h<index>"),
    (TWO_HOSTS | {"chaos": [LOST | {"host": "r0h7"}]}, "chaos.0.host", "r0h0 to r2h1, or s0 to s0"),
    (TWO_HOSTS | {"chaos": [LOST, LOST | {"host": "s1"}]}, "chaos.1.host", "r0h0 to r2h1, or s0 to s0"),
    ({"chaos": [{"at_s": 1, "kind": "helper"}]}, "chaos.0.target", "fork_server, agent, supervisor"),
    ({"chaos": [AID | {"replicas": [0], "signal": "TERM"}]}, "chaos.0.signal", "KILL or STOP"),
    ({"chaos": [AID | {"replicas": [0], "rank": 0}]}, "chaos.0.rank", "null with kind helper"),
    ({"chaos": [AID | {"target": "lighthouse", "replicas": [0]}]}, "chaos.0.replicas", "[] with an edge"),
    ({"chaos": [AID | {"target": "supervisor"}]}, "chaos.0.signal", "STOP, with for_s above 0"),
    ({"debug": {"failpoints": {"x": POINT}}}, "debug.failpoints.x", "one of reduce-begin"),
    ({"alerts": [{}]}, "alerts.0.command", "a program and its arguments, or a url instead"),
    ({"alerts": [{"command": []}]}, "alerts.0.command", "a program and its arguments, or a url instead"),
    ({"alerts": [{"command": [""]}]}, "alerts.0.command.0", "text that is not empty"),
    ({"alerts": [{"url": "https://a", "command": ["b"]}]}, "alerts.0.url", "exactly one of url and command"),
    ({"alerts": [{"command": ["a"], "rules": ["stal"]}]}, "alerts.0.rules.0", "stall, loss, replicas, protection"),
    ({"alerts": [{"command": ["a"], "rules": []}]}, "alerts.0.rules", "at least 1 item, each stall"),
    *(({"alerts": [{"url": url}]}, "alerts.0.url", "text that matches ^https?://") for url in NO_URLS),
    ({"alerts": [{"url": "https://a:99999/hunter2"}]}, "alerts.0.url", "a port from 1 to 65535"),
    ({"alerts": [{"ulr": "https://a/hunter2"}]}, "alerts.0.ulr", "did you mean alerts.0.url?"),
]

# An override, and the same.
BAD_OVERRIDES: list[tuple[str, str, str]] = [
    ("--debug.failpoints.vote={replicas: [0]}", "debug.failpoints.vote.step", "the key is required"),
    ("--debug.failpoints.vote.stepp=1", "debug.failpoints.vote.stepp", "did you mean debug.failpoints.vote.step?"),
    ("--train.steps=", "train.steps", "a whole number from 1 to 1000000000"),
    ("--train.stepz=1", "train.stepz", "did you mean train.steps?"),
    ("--train.steps.x=1", "train.steps.x", "train.steps has no keys below it"),
    ("--train..x=1", "train.", "no such key"),
    ("--train.steps", "override", "--dotted.key=value"),
    ("--=1", "override", "--dotted.key=value"),
    ("--train.steps=[1", "train.steps", "valid YAML (line 1, column 3"),
    ("--replicas=2020-13-45", "replicas", "valid YAML (month must be in 1..12)"),
    ("--chaos.1={at_step: 1, replicas: [0]}", "chaos.1", "a place from 0 to 0 in the list"),
    ("--optim.betas.2=0.1", "optim.betas.2", "no such key"),
    ("--restart.backoff_s='61'", "restart.backoff_s", "a number from 0 to 60"),
]


@pytest.mark.parametrize(
    ("document", "overrides", "key", "allowed"),
    [
        *((document, [], key, allowed) for document, key, allowed in BAD),
        *(({}, [override], key, allowed) for override, key, allowed in BAD_OVERRIDES),
        ({"chaos": [HIT]}, ["--chaos.0.rank=7"], "chaos.0.rank", "0 to 1"),
    ],
)
def test_bad_input_gets_one_line(document: dict[Any, Any], overrides: list[str], key: str, allowed: str) -> None:
    line = refused(lambda: parse(document, overrides), key=key)
    assert allowed in line.partition("; allowed: ")[2]
    assert "hunter2" not in line  # of a webhook


@pytest.mark.parametrize(
    ("content", "allowed"),
    [
        (b"a: [1, 2\n", "valid YAML (line 2, column 1"),
        (b"\xff\xfe\xfa", "valid YAML"),
        (b"a: !!python/object:os.system {}", "valid YAML"),
        (b"- 1\n", "a YAML mapping"),
        (b"{a: 1}: 2\n", "valid YAML"),
        (b"[" * 20000, "valid YAML"),
        (b"replicas: 3\nreplicas: 2\n", "valid YAML (line 2, column 1: the key replicas stands there twice"),
        (b"train: {steps: 9, seed: 1, steps: 10}\n", "(line 1, column 28: the key steps"),
        (b"train: {steps: 010}\n", "(line 1, column 16: 010 is no decimal number"),
        (b"timeouts: {step_s: 1:30}\n", "1:30 is no decimal number"),
        (b"optim: {lr: 1:00.5}\n", "1:00.5 is no decimal number"),
    ],
)
def test_a_file_that_is_no_mapping_gets_one_line(tmp_path: Path, content: bytes, allowed: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_bytes(content)
    assert allowed in refused(lambda: load(file), key="config file")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    refused(lambda: load(tmp_path / "nowhere.yaml"), r"nowhere.yaml'; allowed: .*No such file")
    refused(lambda: load(tmp_path), "Is a directory")


@pytest.mark.parametrize(
    "document",
    [
        {"timeouts": {"return_wait_s": 0, "stop_s": 2500}},  # nobody is waited for
        {"lighthouse": {"etcd_lease_s": 600}},  # nobody is elected
    ],
)
def test_a_wait_that_is_not_used_binds_no_other(document: dict[str, Any]) -> None:
    parse(document)


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("# nothing\n")
    assert load(tmp_path / "c.yaml") == Config()


def test_a_home_is_expanded_and_a_variable_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = parse({"checkpoint": {"dir": "~/c", "key": "~root/k"}}, ["--data.path=~/text", "--job.runs_dir=a~b"])
    assert (config.checkpoint.dir, config.data.path, config.job.runs_dir) == ("/home/me/c", "/home/me/text", "a~b")
    assert config.checkpoint.key == f"{pwd.getpwuid(0).pw_dir}/k"
    for path in ("$SCRATCH/c", "${SCRATCH}", "~nobody-here/c"):
        refused(lambda path=path: parse({"checkpoint": {"dir": path}}), key="checkpoint.dir")


def test_a_merged_mapping_may_be_overridden(tmp_path: Path) -> None:
    hits = "- &a {replicas: [0], rank: 0, at_step: 3}\n- {<<: *a, rank: 1}\n"
    (tmp_path / "c.yaml").write_text(f"chaos:\n{hits}")
    assert [hit.rank for hit in load(tmp_path / "c.yaml").chaos] == [0, 1]


def test_overrides_come_last_and_are_yaml() -> None:
    document = {"train": {"steps": 5, "seed": 3}, "chaos": [HIT]}
    config = parse(document, ["--train.steps=60", "--optim.lr=1e-3", "--optim.clip=", "--chaos.0.rank=1"])
    assert (config.train.steps, config.train.seed, config.optim.lr) == (60, 3, 1e-3)
    assert config.optim.clip is None
    assert config.chaos[0].rank == 1
    assert document == {"train": {"steps": 5, "seed": 3}, "chaos": [HIT]}
    assert parse(document, ["--chaos=[]"]).chaos == ()
    assert parse({}, ["--train.steps=1", "--train.steps=2"]).train.steps == 2
    point = parse({}, ["--debug.failpoints.apply-end={replicas: [2], step: 3}"]).debug.failpoints["apply-end"]
    assert (point.replicas, point.rank, point.life, point.step, point.signal) == ((2,), 0, 0, 3, "KILL")


ODD_PATHS = ["1e-3", "null", "yes", "2020-01-01", "~", "0x1f", " a ", "- b", "1_000"]
HITS = st.builds(lambda at: [{"at_step": at, "replicas": [0]}], st.integers(1, 1000))
POINTS = st.fixed_dictionaries({"replicas": st.just([0]), "step": st.integers(0, 9)})
SECTIONS = {
    "job": {"name": st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True)},
    "train": {"seed": st.integers(0, 2**63 - 1)},
    "data": {"path": st.text(st.characters(codec="utf-8"), min_size=1, max_size=40) | st.sampled_from(ODD_PATHS)},
    "optim": {
        "lr": st.floats(min_value=1e-300, max_value=10),
        "clip": st.none() | st.floats(min_value=1e-9, max_value=1e9),
    },
    "debug": {"failpoints": st.dictionaries(st.sampled_from(sorted(PLACES)), POINTS, max_size=3)},
}


@given(
    st.fixed_dictionaries(
        {name: st.fixed_dictionaries(keys) for name, keys in SECTIONS.items()}
        | {"replicas": st.integers(1, 64), "chaos": st.just([]) | HITS}
    )
)
def test_what_is_dumped_loads_back_equal(
    tmp_path_factory: pytest.TempPathFactory, document: dict[str, Any]
) -> None:
    config = parse(document)
    file = tmp_path_factory.getbasetemp() / "dumped.yaml"
    file.write_text(dump(config), encoding="utf-8")
    assert load(file) == config
    assert config_hash(load(file)) == config_hash(config)


@pytest.mark.parametrize(
    "override",
    [
        *("--model.dim=180", "--data.path=elsewhere", "--optim.lr=0.1", "--lr.schedule=cosine"),
        *("--lr.intervention=sqrt", "--lr.warmup=1", "--train.seed=9", "--train.micro_batch=1"),
        *("--train.seq_len=64", "--train.accumulate=2", "--ranks_per_replica=1", "--train.steps=9"),
        *("--train.poison=skip_step", "--replicas=5", "--max_replicas=5", "--data.assignment=global"),
        *("--data.weight=tokens", "--checkpoint.every=5", "--checkpoint.dir=/elsewhere"),
        *("--quorum.catchup_log_bytes=5", "--ftar.chunk_bytes=8192", "--ftar.dtype=bfloat16"),
        "--train.deterministic=true",
    ],
)
def test_the_hash_changes_with_what_replicas_must_share(override: str) -> None:
    assert config_hash(parse({}, [override])) != config_hash(Config())


@pytest.mark.parametrize(
    "override",
    [
        "--job.name=other",
        "--quorum.on_lost_head=wait",
        "--timeouts.evict_s=5",
        "--quorum.lease_s=100",
        "--ftar.chunks=2",
        "--network.port=99",
        "--chaos=[{at_step: 1, replicas: [0]}]",
        "--model.kv_heads=6",  # the default, spelled out
        "--model.ffn_dim=512",
    ],
)
def test_the_hash_leaves_out_what_they_need_not(override: str) -> None:
    assert config_hash(parse({}, [override])) == config_hash(Config())


def test_a_job_may_resume_with_another_weighting() -> None:
    """It changes what is trained from then on, and nothing that a state holds."""
    assert resume_hash(parse({}, ["--data.weight=tokens"])) == resume_hash(Config())
    assert resume_hash(parse({}, ["--data.path=other"])) != resume_hash(Config())


def test_as_many_data_shards_are_no_difference() -> None:
    assert config_hash(parse({"replicas": 3})) == config_hash(parse({"replicas": 2, "max_replicas": 3}))


def test_what_replicas_must_share_is_listed_by_key_and_bounded() -> None:
    rules = agreed(parse({"data": {"path": "x" * 4000}, "max_replicas": 4}))
    assert (rules["max_replicas"], rules["train.steps"], rules["checkpoint.dir"]) == ("4", "100", "null")
    assert len(rules) <= 64
    assert max(len(key) + len(value) for key, value in rules.items()) <= 200
    other = agreed(parse({"data": {"path": "x" * 3999 + "y"}, "max_replicas": 4}))
    assert [key for key in rules if rules[key] != other[key]] == ["data.path"]


def test_what_may_be_a_secret_is_not_in_what_others_read() -> None:
    etcd = ["http://root:hunter2@a:2379", "http://b:2379"]
    ray = {"runtime_env": {"env_vars": {"A": "hunter2"}, "pip": ["https://u:hunter2@p/x"]}, "labels": {"a": "b"}}
    alerts = [{"url": "https://a/hunter2"}, {"command": ["tell", "hunter2"]}]
    config = parse({"lighthouse": {"etcd": etcd, "count": 3}, "ray": ray, "alerts": alerts})
    shown = public(config)
    assert "hunter2" not in dump(shown)
    assert shown == parse(
        {"lighthouse": {"etcd": ["http://a:2379", "http://b:2379"], "count": 3}, "ray": {"labels": {"a": "b"}}}
    )
    assert (agreed(shown), public(Config())) == (agreed(config), Config())

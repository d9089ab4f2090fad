"""`render jobset` and `render rayjob`: what Kubernetes is given is valid, and says what the configuration says."""

import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp.config import Config, load, parse
from ft_hsdp.errors import ConfigError
from ft_hsdp.launch import cli
from ft_hsdp.launch.render import settings
from ft_hsdp.launch.render.jobset import jobset
from ft_hsdp.launch.render.pod import LONGEST, label
from ft_hsdp.launch.render.rayjob import rayjob
from ft_hsdp.launch.render.settings import Site, document, note
from tests.support.refused import refused

ROOT = Path(__file__).parents[3]
IMAGE = Site(image="registry.example/ft_hsdp:1")
K8S = "#/$defs/io.k8s.api.core.v1."
LABEL = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")


ROOTS = {
    "ConfigMap": {"$ref": f"{K8S}ConfigMap"},
    "PersistentVolumeClaim": {"$ref": f"{K8S}PersistentVolumeClaim"},
    "JobSet": {"$ref": "#/$defs/JobsetV1alpha2JobSet"},
    "RayJob": {"$ref": "#/$defs/RayJob"},
}


@cache
def _definitions() -> dict[str, Any]:
    files = [ROOT / "tests/launch/schemas" / name for name in ("kubernetes.json", "jobset.json", "rayjob.json")]
    return {name: schema for file in files for name, schema in json.loads(file.read_text())["$defs"].items()}


def _parts(text: str) -> dict[str, dict[str, Any]]:
    """The objects of a manifest by kind, each valid against its schema."""
    parts = {part["kind"]: part for part in yaml.safe_load_all(text)}
    for kind, part in parts.items():
        jsonschema.Draft202012Validator({**ROOTS[kind], "$defs": _definitions()}).validate(part)
    return parts


def _pods(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        if "containers" in value:
            yield value
        for each in value.values():
            yield from _pods(each)
    elif isinstance(value, list):
        for each in value:
            yield from _pods(each)


def _quickstart(*overrides: str) -> Config:
    return load(ROOT / "configs/quickstart.yaml", ["--chaos=[]", *overrides])


CASES = {
    "plain": (_quickstart(), IMAGE),
    "gpu": (
        load(ROOT / "configs/gpu.yaml", ["--ray.resources.GPU=1"]),
        Site(image="a", gpus=2, cpus=8, memory_gib=64),
    ),
    "placed": (
        _quickstart("--job.name=My_Job.1"),
        Site(image="a@sha256:0", namespace="ml", claim="shared", secret="s"),
    ),
    "large": (
        _quickstart("--replicas=64", "--ranks_per_replica=64", "--network.allow=[10.0.0.0/8]"),
        Site(image="a", nodes=8),
    ),
    "zones": (
        _quickstart(
            "--ray.zones=[a, b]", '--ray.labels={ray.io/x: "no"}', "--ray.resources={nvme: 0.5}", "--spares=2"
        ),
        IMAGE,
    ),
}


@pytest.mark.parametrize("render", [jobset, rayjob])
@pytest.mark.parametrize("case", CASES)
def test_manifests_are_valid(render: Any, case: str) -> None:
    text = render(*CASES[case])
    parts = _parts(text)
    assert text == render(*CASES[case]), "another text for the same input"
    for part in parts.values():
        assert LABEL.fullmatch(part["metadata"]["name"])
        assert part["metadata"].get("namespace") == CASES[case][1].namespace
    for spec in _pods(parts):
        volumes = [volume["name"] for volume in spec.get("volumes", ())]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["automountServiceAccountToken"] is False
        for container in spec["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert [mount["name"] for mount in container.get("volumeMounts", ())] == volumes


def test_a_configmap_holds_the_job(tmp_path: Path) -> None:
    config = _quickstart("--data.path='/data/a: b'", "--job.name='1e-3'")
    for render in (jobset, rayjob):
        file = tmp_path / "config.yaml"
        file.write_text(_parts(render(config, IMAGE))["ConfigMap"]["data"]["config.yaml"])
        there = load(file)
        assert (there.job.name, there.job.runs_dir, there.data.path) == ("1e-3", "/runs", "/data/a: b")
        assert there.model == config.model


def test_a_replica_of_a_jobset_starts_and_ends_by_itself() -> None:
    config = _quickstart("--timeouts.stop_s=20.5", "--max_replicas=5")
    spec = _parts(jobset(config, Site(image="a", cpus=3, memory_gib=7)))["JobSet"]["spec"]
    lighthouse, replica = spec["replicatedJobs"]
    assert spec["successPolicy"]["targetReplicatedJobs"] == ["replica"]
    assert spec["failurePolicy"] == {"maxRestarts": 0}
    assert replica["dependsOn"] == [{"name": "lighthouse", "status": "Ready"}]
    assert (lighthouse["replicas"], replica["replicas"]) == (1, 5)
    job = replica["template"]["spec"]
    refused, disrupted = job["podFailurePolicy"]["rules"]
    assert (refused["action"], refused["onExitCodes"]["values"]) == ("FailJob", [64])
    assert (disrupted["action"], disrupted["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
    pod = job["template"]["spec"]
    container = pod["containers"][0]
    assert refused["onExitCodes"]["containerName"] == container["name"]
    assert pod["terminationGracePeriodSeconds"] > 20.5
    assert container["resources"] == {"requests": {"cpu": "6", "memory": "7Gi"}, "limits": {"memory": "7Gi"}}
    probe = lighthouse["template"]["spec"]["template"]["spec"]["containers"][0]["readinessProbe"]["httpGet"]
    assert container["args"][-1] == f"http://quickstart-lighthouse-0-0.quickstart:{probe['port']}"
    there = lighthouse["template"]["spec"]["template"]["spec"]["containers"][0]["args"]
    assert there[-2:] == ["--url", container["args"][-1]], "what it writes down must hold in all pods"
    tokens = [e for s in _pods(spec) for c in s["containers"] for e in c["env"] if e["name"] == "FT_HSDP_TOKEN"]
    assert [t["valueFrom"]["secretKeyRef"]["name"] for t in tokens] == ["quickstart-token"] * 2
    told = {e["name"]: e.get("value") or e["valueFrom"] for e in container["env"]}
    assert told["FT_HSDP_HOST"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
    assert told["FT_HSDP_DOMAINS"] == "zone=$(ZONE)"
    assert list(told).index("ZONE") < list(told).index("FT_HSDP_DOMAINS"), (
        "Kubernetes fills in earlier variables only"
    )


def test_each_machine_of_a_jobset_is_a_job_on_a_node_of_its_own() -> None:
    hosts = "--hosts.per_replica=4", "--hosts.spare=2"
    parts = _parts(jobset(_quickstart("--ranks_per_replica=8", *hosts, "--network.allow=[10.0.0.0/8]"), IMAGE))
    spec = parts["JobSet"]["spec"]
    assert spec["successPolicy"]["targetReplicatedJobs"] == ["machine"]
    machine = spec["replicatedJobs"][1]
    assert (machine["name"], machine["replicas"]) == ("machine", 3 * 4 + 2)
    pod = machine["template"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["args"][:2] == ["host", "/etc/ft_hsdp/config.yaml"]
    assert pod["containers"][0]["resources"]["requests"]["cpu"] == "2"
    (apart,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert apart["labelSelector"]["matchLabels"]["jobset.sigs.k8s.io/replicatedjob-name"] == machine["name"]
    assert "per_replica: 4" in parts["ConfigMap"]["data"]["config.yaml"]


def test_a_rayjob_has_the_pods_that_the_placement_needs() -> None:
    def groups(*overrides: str) -> list[dict[str, Any]]:
        spec = _parts(rayjob(_quickstart(*overrides), IMAGE))["RayJob"]["spec"]
        assert spec["entrypoint"].endswith("submit /etc/ft_hsdp/config.yaml")
        assert spec["shutdownAfterJobFinishes"] is True
        assert spec["rayClusterSpec"]["authOptions"] == {"mode": "token"}
        assert spec["submitterPodTemplate"]["spec"]["restartPolicy"] == "Never"
        return spec["rayClusterSpec"]["workerGroupSpecs"]

    def sizes(*overrides: str) -> list[tuple[int, int, str]]:
        return [(g["replicas"], g["maxReplicas"], g["rayStartParams"]["num-cpus"]) for g in groups(*overrides)]

    assert sizes() == [(3, 3, "2")]
    assert sizes("--max_replicas=6", "--spares=4", "--ray.resources.CPU=4") == [(5, 8, "8")]
    assert sizes("--ray.strategy=SPREAD", "--spares=2") == [(8, 8, "1")]
    assert sizes("--ray.zones=[a, b]") == [(2, 2, "2"), (1, 1, "2")]
    zoned = groups("--ray.zones=[a, b]", "--ray.resources={nvme: 1}")[1]
    assert zoned["labels"] == {"ray.io/availability-zone": "b"}
    assert zoned["template"]["spec"]["nodeSelector"] == {"topology.kubernetes.io/zone": "b"}
    assert zoned["rayStartParams"]["resources"] == "'{\"nvme\": 2.0}'"


@pytest.mark.parametrize(
    ("render", "site", "overrides", "key"),
    [
        (jobset, Site(image="a b"), (), "--image"),
        (jobset, Site(image="a", namespace="Ml"), (), "--namespace"),
        (jobset, Site(image="a", claim="x y"), (), "--claim"),
        (jobset, Site(image="a", memory_gib=0), (), "--memory-gib"),
        (jobset, Site(image="a", cpus=0), (), "--cpus-per-rank"),
        (jobset, Site(image="a", gpus=-1), (), "--gpus-per-rank"),
        (jobset, Site(image="a", nodes=3), (), "--nodes-per-replica"),
        (jobset, Site(image="a", nodes=2), (), "network.allow"),
        (jobset, IMAGE, ("--checkpoint.every=5",), "checkpoint.every"),
        (rayjob, IMAGE, ("--checkpoint.every=5",), "checkpoint.every"),
        (jobset, IMAGE, ("--checkpoint.dir=/runs/ckpt",), "checkpoint.dir"),
        (rayjob, IMAGE, ("--checkpoint.dir=/runs/ckpt",), "checkpoint.dir"),
        (jobset, Site(image="a", claim="shared"), ("--checkpoint.dir=ckpt",), "checkpoint.dir"),
        (jobset, IMAGE, ("--entry=train.py",), "entry"),
        (jobset, IMAGE, ("--network.tls_certificate=a", "--network.tls_key=b"), "network.tls_certificate"),
        (jobset, IMAGE, ("--lighthouse.count=2", "--lighthouse.etcd=[http://a:2379]"), "lighthouse.count"),
        (jobset, IMAGE, ("--job.name=---",), "job.name"),
        (rayjob, IMAGE, ("--train.device=cuda",), "ray.resources.GPU"),
    ],
)
def test_what_would_not_work_is_one_line(render: Any, site: Site, overrides: tuple[str, ...], key: str) -> None:
    refused(lambda: render(_quickstart(*overrides), site), key=key)


def test_the_command_prints_the_file_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    config = str(ROOT / "configs/quickstart.yaml")
    sys.stdout.reconfigure(encoding="latin-1")  # as in the locale of this machine
    overrides = "--replicas=2", "--data.path=für"
    assert cli.main(["render", "jobset", config, "--image", "a", "--claim", "shared", *overrides]) == 0
    parts = _parts(out := capsys.readouterr().out)
    assert "path: für" in out
    assert parts["JobSet"]["spec"]["replicatedJobs"][1]["replicas"] == 2
    assert "PersistentVolumeClaim" not in parts
    assert cli.main(["render", "jobset", config]) == 64
    assert capsys.readouterr().err.count("\n") == 1
    assert cli.main(["render", "rayjob", config, "--image", "a", "--relicas=2"]) == 64
    assert capsys.readouterr().out == ""


# What a rendered file says is what was meant: YAML, names, and the configuration in it.


WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Zl", "Zp"]), max_size=20)
LINES = st.lists(WORDS.map(lambda w: f"x{w}"), min_size=2, max_size=3).map("\n".join)
TRICKY = st.sampled_from(
    ["no", "1e-3", "0x1f", "~", "null", "- a", "a: b", "a #b", "", " ", "'", '"', "12:30", "=", "2026-01-01", "%a"]
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | WORDS
    | TRICKY
    | LINES
)
KEYS = WORDS | TRICKY
TREES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3))


@given(st.dictionaries(KEYS, TREES, min_size=1, max_size=3))
def test_a_document_is_read_as_it_was_meant(tree: dict[str, Any]) -> None:
    assert yaml.safe_load(document(tree)) == tree


def test_comments_stand_above_what_they_are_about() -> None:
    tree = {
        **note("why it's so"),
        "a": 1,
        "b": [{**note("two\nlines"), "c": 2}, {**note("first"), "d": 3}],
    }
    assert re.findall("# .*", document(tree)) == ["# why it's so", "# two", "# lines", "# first"]
    assert yaml.safe_load(document(tree)) == {"a": 1, "b": [{"c": 2}, {"d": 3}]}


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("llama", "llama"),
        ("Llama_3.1-70B", "llama-3-1-70b"),
        ("70b", "job-70b"),
        ("-a.", "a"),
        ("a" * LONGEST, "a" * LONGEST),
    ],
)
def test_a_jobs_name_becomes_a_label(name: str, made: str) -> None:
    assert label(name) == made


@pytest.mark.parametrize("name", ["a" * (LONGEST + 1), "---", "_._", "9" * LONGEST])
def test_a_name_of_which_no_label_can_be_made_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^job.name: got '.*'; allowed: a name of which Kubernetes"):
        label(name)


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"job": {"name": "1e-3"}, "data": {"path": "a: b #c"}, "optim": {"eps": 1e-8, "clip": None}},
        {"chaos": [{"at_step": 3, "replicas": [1], "signal": "STOP", "for_s": 1.5}]},
        {"ray": {"labels": {"a/b": "on"}, "runtime_env": {"pip": ["x==1"], "env_vars": {"A": "no"}}}},
        {"network": {"allow": ["10.0.0.0/8"], "host": "::"}, "debug": {"failpoints": {}}},
    ],
)
def test_the_configuration_in_a_file_is_the_users(document: dict[str, Any], tmp_path: Path) -> None:
    config = parse(document)
    file = tmp_path / "config.yaml"
    file.write_text(settings.dump(config))
    assert load(file) == config


@pytest.mark.parametrize("name", ["quickstart", "kills", "gpu"])
def test_only_what_one_machine_implies_is_changed(name: str, tmp_path: Path) -> None:
    config = load(ROOT / f"configs/{name}.yaml")
    file = tmp_path / "config.yaml"
    file.write_text(settings.dump(settings.spread(config)))
    changed = load(file)
    assert (changed.network.host, changed.timeouts.reach_s) == ("0.0.0.0", settings.REACH_S)
    assert changed.model_copy(update={"network": config.network, "timeouts": config.timeouts}) == config


def test_what_the_user_says_of_the_network_stays() -> None:
    config = parse({"network": {"host": "10.0.0.5"}, "timeouts": {"reach_s": 33.0}})
    assert settings.spread(config) == config


@pytest.mark.parametrize(
    ("document", "key"),
    [
        ({"lighthouse": {"etcd": ["http://root:hunter2@a:2379"]}}, "lighthouse.etcd"),
        ({"alerts": [{"url": "https://a/hunter2"}]}, "alerts.0.url"),
        ({"ray": {"runtime_env": {"env_vars": {"WANDB_API_KEY": "hunter2"}}}}, "ray.runtime_env"),
        ({"ray": {"runtime_env": {"env_vars": {"db_password": "hunter2"}}}}, "ray.runtime_env"),
    ],
)
def test_a_secret_is_refused_without_being_shown(document: dict[str, Any], key: str) -> None:
    assert "hunter2" not in refused(lambda: settings.dump(parse(document)), key=key)


@pytest.mark.parametrize("render", [jobset, rayjob])
@pytest.mark.parametrize("entry", ["/app/train.py", "app.train:main"])
def test_what_the_ranks_run_is_named(render: Any, entry: str) -> None:
    head, *_ = render(parse({"entry": entry}), IMAGE).split("\n", 1)
    assert f"ranks of {entry}" in head

"""What a rendered file says is what was meant: YAML, names, and the configuration in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp.config import load, parse
from ft_hsdp.errors import ConfigError
from ft_hsdp.launch.render import settings
from ft_hsdp.launch.render.pod import LONGEST, label
from ft_hsdp.launch.render.text import CommentedValue, document

ROOT = Path(__file__).parents[3]
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
        "a": CommentedValue("why", 1),
        "b": [CommentedValue("two\nlines", {"c": 2}), {"d": CommentedValue("first", 3)}],
    }
    assert document(tree) == "# why\na: 1\nb:\n  # two\n  # lines\n  - c: 2\n  -\n    # first\n    d: 3\n"
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
        ({"ray": {"runtime_env": {"env_vars": {"WANDB_API_KEY": "hunter2"}}}}, "ray.runtime_env"),
        ({"ray": {"runtime_env": {"env_vars": {"db_password": "hunter2"}}}}, "ray.runtime_env"),
    ],
)
def test_a_secret_is_refused_without_being_shown(document: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        settings.dump(parse(document))
    assert refused.value.key == key
    assert "hunter2" not in str(refused.value)

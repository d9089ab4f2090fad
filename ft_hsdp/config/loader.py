"""Configuration in and out: `load`, `dump`, `agreed`, `config_hash`, `json_schema`."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from ft_hsdp.config.config import Config
from ft_hsdp.config.entry import title
from ft_hsdp.config.explain import explain, knows, schema_of, unknown_key
from ft_hsdp.core.replica_state import ENTRY, PROTOCOL, PROTOCOL_VERSION
from ft_hsdp.errors import ConfigError

Model = TypeVar("Model", bound=BaseModel)

VALUE_LIMIT = 160  # characters of one agreed value
_INT_TAG, _FLOAT_TAG, _MERGE_TAG = (f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "merge"))
_SURPRISING = re.compile(r"[-+]?0[0-9_]+$|.*:")  # 010 is 8, and 1:30 is 90
_PASSWORD = re.compile("//[^/?#]*@")
_EXPONENT = re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$")


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-3 is a number, as users expect (YAML 1.1 wants 1.0e-3), and that refuses its surprises."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        """Return a mapping.

        Raises:
            MarkedYAMLError: A key stands there twice: the last value would count, without a word.
        """
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE_TAG:
                continue
            if key.value in seen:
                raise yaml.MarkedYAMLError(None, None, f"the key {key.value} stands there twice", key.start_mark)
            seen.add(key.value)
        return node

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        """Return a number in decimal, 0x or 0b.

        Raises:
            MarkedYAMLError: It is octal, or to the base 60.
        """
        if _SURPRISING.match(node.value):
            why = f"{node.value} is no decimal number in YAML 1.1 (octal, or to the base 60); put text in quotes"
            raise yaml.MarkedYAMLError(None, None, why, node.start_mark)
        of_kind = self.construct_yaml_int if node.tag == _INT_TAG else self.construct_yaml_float
        number: int | float = of_kind(node)
        return number


class YamlDumper(yaml.SafeDumper):
    """Writes what `_Loader` reads: text that looks like 1e-3 gets quotes."""


_Loader.add_constructor(_INT_TAG, _Loader.construct_number)
_Loader.add_constructor(_FLOAT_TAG, _Loader.construct_number)
_Loader.add_implicit_resolver(_FLOAT_TAG, _EXPONENT, list("-+0123456789"))
YamlDumper.add_implicit_resolver(_FLOAT_TAG, _EXPONENT, list("-+0123456789"))


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration in a YAML file.

    Args:
        path: of the file.
        overrides: such as `--train.steps=60`; later ones win.

    Returns:
        A checked, frozen configuration.

    Raises:
        ConfigError: the file cannot be read, or a value is wrong; its text is one line.
    """
    return parse(_read(path), overrides)


def load_as(kind: type[Model], path: Path) -> Model:
    """Return what a YAML file of another kind says.

    Args:
        kind: the model of its keys.
        path: of the file.

    Returns:
        An instance of `kind`, checked.

    Raises:
        ConfigError: the file cannot be read, or a value is wrong; its text is one line.
    """
    document = _read(path)
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        refusal: ConfigError = explain(error, kind, document)
        raise refusal from None


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError("config file", str(path), f"a YAML file that can be read ({error.strerror})") from None
    document = _parse_yaml("config file", text, shown=str(path))
    document = {} if document is None else document
    if not isinstance(document, dict):
        raise ConfigError("config file", str(path), "a YAML mapping of keys at the top level")
    return document


def parse(document: dict[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Return the configuration in a mapping, as `load` does from a file.

    Args:
        document: what a YAML file would contain; it is not changed.
        overrides: such as `--train.steps=60`; later ones win.

    Returns:
        A checked, frozen configuration.

    Raises:
        ConfigError: a value is wrong; its text is one line.
    """
    for override in overrides:
        document = _override(document, override)
    try:
        return Config.model_validate(document)
    except ValidationError as error:
        refusal: ConfigError = explain(error, Config, document)
        raise refusal from None


def dump(config: Config) -> str:
    """Return `config` as YAML with all defaults; `load` makes an equal configuration of it."""
    text: str = yaml.dump(
        config.model_dump(), Dumper=YamlDumper, sort_keys=False, allow_unicode=True, default_flow_style=False
    )
    return text


def public(config: Config) -> Config:
    """Return the configuration without what may be a secret, for files that others than its owner may read.

    Args:
        config: of a job.

    Returns:
        A copy without alerts, whose webhooks and commands are secrets; without passwords in URLs of etcd; and
        without Ray's runtime environment, which has variables and URLs of packages.
    """
    etcd = tuple(_PASSWORD.sub("//", url) for url in config.lighthouse.etcd)
    changes = {
        "alerts": (),
        "lighthouse": config.lighthouse.model_copy(update={"etcd": etcd}),
        "ray": config.ray.model_copy(update={"runtime_env": {}}),
    }
    return config.model_copy(update=changes)


def agreed(config: Config) -> dict[str, str]:
    """Return the values that all replicas of a job must have in common, as JSON text by dotted key.

    They are all that change what is trained, on which data, or by which rule, and `PROTOCOL_VERSION`. Of an
    `entry` they are the name and the digest of its file, which may be in another folder on another machine.
    `max_replicas` is `Config.slots`; `checkpoint.dir` says only whether there is one. A long value is cut, with
    its hash in place of the rest.

    Args:
        config: of one replica.

    Returns:
        Sorted by key.
    """
    train = config.train.model_dump(
        include={"steps", "seed", "micro_batch", "seq_len", "accumulate", "precision", "poison"}
    )
    data = config.data.model_dump(exclude={"check"} if config.data.resume == "other" else {"check", "resume"})
    sections: dict[str, dict[str, Any]] = {
        "model": _model(config),
        "data": data,
        "optim": config.optim.model_dump(exclude={"offload"}),
        "lr": config.lr.model_dump(),
        "train": train | config.train.model_dump(include={"deterministic", "norm_mads"}, exclude_defaults=True),
        "quorum": config.quorum.model_dump(
            include={"catchup_log_bytes", "batch", "refill", "allowed", "max_accumulate"}
        ),
        "checkpoint": {"every": config.checkpoint.every, "dir": config.checkpoint.dir and "given"},
        "ftar": config.ftar.model_dump(include={"chunk_bytes"})
        | config.ftar.model_dump(include={"dtype"}, exclude_defaults=True),
        "memory": config.memory.model_dump(exclude={"wait_s"}),  # each rank computes from it which copies are made
    }
    flat = {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}
    flat |= {"ranks_per_replica": config.ranks_per_replica, "ranks_per_unit": config.ranks_per_unit}
    flat |= {"max_replicas": config.slots}
    flat |= {PROTOCOL: PROTOCOL_VERSION}
    if config.entry is not None:
        flat |= {ENTRY: f"{title(config.entry)} {config.entry_digest}", "args": config.args}
    return {key: _short(_canonical(value)) for key, value in sorted(flat.items())}


def config_hash(config: Config) -> str:
    """Return the hash over `agreed(config)`: 32 hex digits."""
    return _hash(agreed(config))


def resume_hash(config: Config, data: Mapping[str, Any] | None = None) -> str:
    """Return the hash over what a checkpoint and the job that resumes from it must have in common: 32 hex digits.

    It covers the model, the text, the seed and the number of sequences that a replica trains in a step; not the
    number of replicas, nor of their ranks. The optimizer's arguments may change: the resume compares them itself.

    Args:
        config: of the job.
        data: the values of section ``data`` that it is to have instead of its own.

    Returns:
        32 hex digits.
    """
    train, own = config.train, config.data.model_dump(exclude={"assignment", "weight", "check", "resume"})
    shared = {
        "model": _model(config),
        "data": {key: (data or {}).get(key, value) for key, value in own.items()},
        "seed": train.seed,
        "seq_len": train.seq_len,
        "sequences": train.micro_batch * train.accumulate * config.data_ranks,
    }
    return _hash(shared)


def _model(config: Config) -> dict[str, Any]:
    model = config.model
    return {**model.model_dump(), "kv_heads": model.key_value_heads, "ffn_dim": model.hidden_dim}


def _hash(shared: dict[str, Any]) -> str:
    return hashlib.blake2b(_canonical(shared).encode(), digest_size=16, person=b"ft_hsdp.config").hexdigest()


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _short(text: str) -> str:
    """Return `text`, or its beginning and its hash if it is long."""
    return text if len(text) <= VALUE_LIMIT else f"{text[: VALUE_LIMIT - 40]}...{_hash({'value': text})}"


def json_schema() -> str:
    """Return the JSON schema of the configuration, for editors: the content of configs/schema.json."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema_of(Config)}
    return json.dumps(schema, indent=2) + "\n"


def _override(document: dict[str, Any], text: str) -> dict[str, Any]:
    """Return a copy of `document` with `--dotted.key=value` put in; the value is YAML.

    Raises:
        ConfigError: it has no such form, the key is unknown, or the value is no YAML.
    """
    name, equals, value_text = text.removeprefix("--").partition("=")
    if not equals or not name:
        raise ConfigError("override", text, "--dotted.key=value")
    path = [int(part) if part.isdecimal() else part for part in name.split(".")]
    if not knows(Config, path):
        known = next(n for n in range(len(path)) if not knows(Config, path[: n + 1]))
        refusal: ConfigError = unknown_key(path[: known + 1], Config, value_text)
        raise refusal
    changed: dict[str, Any] = _put(document, path, 0, _parse_yaml(name, value_text, shown=value_text))
    return changed


def _put(here: Any, path: Sequence[int | str], depth: int, value: Any) -> Any:
    """Return a copy of `here` in which `path[depth:]` is `value`; what is missing on the path is created.

    Raises:
        ConfigError: a number in the path is above the length of its list.
    """
    if depth == len(path):
        return value
    part = path[depth]
    if isinstance(part, int):
        items = list(here) if isinstance(here, Sequence) and not isinstance(here, str) else []
        if part > len(items):
            raise ConfigError(".".join(map(str, path)), value, f"a place from 0 to {len(items)} in the list")
        items[part : part + 1] = [_put(items[part] if part < len(items) else None, path, depth + 1, value)]
        return items
    mapping = dict(here) if isinstance(here, dict) else {}
    mapping[part] = _put(mapping.get(part), path, depth + 1, value)
    return mapping


def _parse_yaml(key: str, text: str | bytes, shown: str) -> Any:
    """Return the value of a YAML document.

    Raises:
        ConfigError: on `key`, if `text` is no YAML.
    """
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - _Loader is a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(key, shown, f"valid YAML ({place}{error.problem})") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(key, shown, f"valid YAML ({error})") from None

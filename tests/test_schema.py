"""configs/schema.json: what editors complete and check is what `load` takes."""

import contextlib
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from ft_hsdp.config import Config, RestartConfig, TimeoutsConfig, dump, load, parse
from ft_hsdp.config.loader import _override
from ft_hsdp.errors import ConfigError
from ft_hsdp.launch.cli import main
from tests.test_config import BAD, BAD_OVERRIDES

ROOT = Path(__file__).parent.parent
FILE = ROOT / "configs/schema.json"
SCHEMA: dict[str, Any] = json.loads(FILE.read_text())
SECTIONS = {"Config": SCHEMA, **SCHEMA["$defs"]}
KEYS = [(section, key) for section, body in SECTIONS.items() for key in body["properties"]]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)

# What a schema cannot say: how two values are related, that 3.0 is no whole number, that no line may end, and that
# a key is no number.
UNSAID = {
    ("replicas", "3.0"),
    ("job.name", "'ab\\n'"),
    ("optim.lr", "nan"),
    *(("model.dim", str(n)) for n in (100, 9)),
    ("model.kv_heads", "4"),
    ("quorum.min_replicas", "4"),
    *(("quorum.allowed", values) for values in ("[4, 8]", "[1]")),
    ("quorum.refill", "'same_step'"),
    ("quorum.max_accumulate", "4"),
    ("quorum.max_accumulate", "2"),
    ("ranks_per_unit", "3"),
    ("hosts.per_replica", "3"),
    ("memory.copies", "2"),
    *(("memory.shrink_to", str(n)) for n in (1, 2, 3)),
    ("memory.wait_s", "60.0"),
    ("args", "['--lr']"),
    ("entry_digest", repr("ab" * 16)),
    ("chaos.1.replicas", "[3]"),
    *(("chaos.0.rank", str(n)) for n in (0, 2)),
    ("timeouts.factor", "60"),
    ("chaos.0.edge", "[0, 3]"),
    ("chaos.0.replicas", "[0]"),
    *(("chaos.0.host", repr(name)) for name in ("a", "nope", "r0h7", "r00h0")),
    ("chaos.1.host", "'s1'"),
    *(("hosts.labels." + key, "None") for key in ("7", "None")),
    ("chaos.0.signal", "'STOP'"),
    ("chaos.0.signal", "'TERM'"),
    ("chaos.0.signal", "None"),
    ("chaos.0.down_steps", "2"),
    ("chaos.0.reject", "True"),
    ("alerts.0.url", "'https://a:99999/hunter2'"),
}
WAITS = {"timeouts", "restart", "ftar", "quorum", "lighthouse"}  # their waits are bounded by each other


def _documents() -> list[tuple[str, Any]]:
    """The bad documents of test_config with the key that is at fault, overrides put in where that can be done."""
    documents: list[tuple[str, Any]] = [(key, document) for document, key, _ in BAD]
    for override, key, _ in BAD_OVERRIDES:
        with contextlib.suppress(ConfigError):  # it is no document
            documents.append((key, _override({}, override)))
    return documents


def test_the_command_writes_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert FILE.read_text() == capsys.readouterr().out, (
        "write it anew: python launcher.py schema > configs/schema.json"
    )


@pytest.mark.parametrize("file", CONFIGS, ids=lambda f: f.name)
def test_a_config_fits_and_tells_its_editor_so(file: Path) -> None:
    text = file.read_text()
    assert text.startswith("# yaml-language-server: $schema=schema.json\n")
    VALIDATOR.validate(yaml.safe_load(text))
    config = load(file)
    VALIDATOR.validate(dumped := yaml.safe_load(dump(config)))
    assert parse(dumped) == config


def test_defaults_and_what_is_dumped_fit() -> None:
    VALIDATOR.check_schema(SCHEMA)
    VALIDATOR.validate({})
    VALIDATOR.validate(yaml.safe_load(dump(Config())))
    chaos = [{"rate_per_min": 2, "replicas": [0], "signal": "STOP", "for_s": 1}]
    offload = {"optim": {"offload": True}, "train": {"device": "cuda"}, "chaos": chaos}
    VALIDATOR.validate(yaml.safe_load(dump(parse(offload))))


@pytest.mark.parametrize(("key", "document"), _documents(), ids=[key for key, _ in _documents()])
def test_bad_input_does_not_fit_as_far_as_a_schema_can_say_so(key: str, document: Any) -> None:
    value: Any = document
    for part in key.split("."):
        if isinstance(value, list):
            value = value[int(part)]
        else:
            value = value.get(part) if isinstance(value, dict) else None
    related = key.split(".")[0] in WAITS and isinstance(value, int | float | None) and key.endswith("_s")
    said = not (related or (key, repr(value)) in UNSAID)
    assert VALIDATOR.is_valid(document) is not said


@pytest.mark.parametrize(("section", "key"), KEYS, ids=[".".join(key) for key in KEYS])
def test_a_key_says_what_it_is_for_and_what_it_is_without_being_given(section: str, key: str) -> None:
    body = SECTIONS[section]
    field = body["properties"][key]
    if "$ref" in field:
        assert SECTIONS[field["$ref"].rsplit("/", 1)[1]]["description"]
        return
    assert field["description"]
    assert ("default" in field) is (key not in body.get("required", []))
    for choice in (field, *field.get("anyOf", [])):
        if choice.get("type") in ("integer", "number"):
            assert choice.keys() & {"minimum", "exclusiveMinimum"}
            wait = section in (TimeoutsConfig.__name__, RestartConfig.__name__) or choice["type"] == "integer"
            assert not wait or choice.keys() & {"maximum", "exclusiveMaximum"}

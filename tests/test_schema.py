"""configs/schema.json: what editors complete and check is what `load` takes."""

import contextlib
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from pydantic import ValidationError

from ft_hsdp.config import Config, RestartConfig, TimeoutsConfig, dump, load, parse
from ft_hsdp.config.base import CROSS_FIELD
from ft_hsdp.config.loader import _override
from ft_hsdp.errors import ConfigError
from ft_hsdp.launch.cli import main
from tests.test_config import BAD, BAD_OVERRIDES

ROOT = Path(__file__).parent.parent
FILE = ROOT / "configs/schema.json"
SCHEMA: dict[str, Any] = json.loads(FILE.read_text())
SECTIONS = {"Config": SCHEMA, **SCHEMA["$defs"]}
KEYS = [(section, key) for section, body in SECTIONS.items() for key in body["properties"]]
CONFIGS = sorted(set((ROOT / "configs").glob("*.yaml")) - {ROOT / "configs" / "study.yaml"})
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)

# Errors of one value that a schema cannot say: 3.0 is no whole number, no line may end, and a key is text.
UNSAID = ("3.0", "'ab\\n'", "nan")
NAMES = ("debug.failpoints.x", "chaos.0.kind")  # a check of its own tells more than the schema's list


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
def test_the_schema_says_what_a_single_value_may_be(key: str, document: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        Config.model_validate(document)
    error = caught.value.errors(include_url=False, include_context=False)[0]
    related = error["type"] == CROSS_FIELD and key not in NAMES
    said = not (related or error["loc"][-1] == "[key]" or repr(error["input"]) in UNSAID)
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

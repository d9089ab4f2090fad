"""Turns a validation error of pydantic into the one line that tells a user what to change.

What is allowed at a key is read from the JSON schema of the models, so the message cannot differ from the check.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import BaseModel, ValidationError

from ft_hsdp.config.base import CROSS_FIELD
from ft_hsdp.config.network import WEBHOOK
from ft_hsdp.config.timeouts import TimeoutsConfig
from ft_hsdp.errors import ConfigError

Schema = Mapping[str, Any]
_ANYTHING: Schema = {"description": "any value"}
_UNKNOWN_KEY = ("extra_forbidden", "invalid_key")


@cache
def schema_of(model: type[BaseModel]) -> Schema:
    return model.model_json_schema()


def explain(error: ValidationError, model: type[BaseModel], given: object) -> ConfigError:
    """Return the first problem in a validation error.

    Returns:
        The error to raise.
    """
    problem = error.errors(include_url=False)[0]
    loc = problem["loc"]
    if problem["type"] == CROSS_FIELD:
        ctx = problem["ctx"]
        return ConfigError(dotted([*loc, *filter(None, [ctx["key"]])]), ctx["value"], ctx["allowed"])
    if problem["type"] in _UNKNOWN_KEY:
        return unknown_key([p for p in loc if p != "[key]"], model, _value_at(given, loc))
    if loc[-1:] == ("[key]",):  # a number or null as a key: YAML reads 7 and null as such without quotes
        return ConfigError(dotted(loc[:-1]), loc[-2], "a key that is text: put it into quotes")
    if problem["type"] == "missing" and isinstance(loc[-1], int):
        loc = loc[:-1]  # name the list that is too short, not the item that is missing
    elif problem["type"] == "missing":
        return ConfigError(dotted(loc), None, f"{describe_at(model, loc)} (the key is required)")
    return ConfigError(dotted(loc), _value_at(given, loc), describe_at(model, loc))


def unknown_key(path: Sequence[int | str], model: type[BaseModel], value: object) -> ConfigError:
    """Return the error for a key that does not exist; it names the nearest key that does.

    Of a wait that follows a key it names that key.

    Returns:
        The error to raise.
    """
    above = dotted(path[:-1])
    rule = TimeoutsConfig.derived().get(str(path[-1])) if above == "timeouts" else None
    if rule is not None:
        allowed = (
            f"no value: it is {rule.times:.3g} x timeouts.{rule.base}; set that, or timeouts.factor for all waits"
        )
        return ConfigError(dotted(path), value, allowed)
    siblings = list(_resolve(model, path[:-1]).get("properties", {}))
    below = [
        f"{each}.{key}" for each in siblings for key in _resolve(model, [*path[:-1], each]).get("properties", {})
    ]
    same = [key for key in below if key.rpartition(".")[2] == path[-1]]
    near = same[:1] or difflib.get_close_matches(str(path[-1]), siblings, n=1, cutoff=0.6)
    meant = f"; did you mean {dotted([*path[:-1], near[0]])}?" if near else ";"
    names = ", ".join(siblings) or "no keys below it"
    return ConfigError(dotted(path), value, f"there is no such key{meant} {above or 'the top level'} has {names}")


def dotted(path: Sequence[int | str]) -> str:
    """Return `("chaos", 0, "rank")` as the user writes it: `chaos.0.rank`."""
    return ".".join(str(part) for part in path)


def describe_at(model: type[BaseModel], path: Sequence[int | str]) -> str:
    """Return what may stand at `path`, in words."""
    return _describe(_resolve(model, path), schema_of(model))


def knows(model: type[BaseModel], path: Sequence[int | str]) -> bool:
    """Return whether `path` is a key of `model`, or lies in a free-form or repeated one."""
    return bool(_resolve(model, path))


def _resolve(model: type[BaseModel], path: Sequence[int | str]) -> Schema:
    """Return the schema at `path`; empty if there is none."""
    root = schema_of(model)
    here: Schema = root
    for part in path:
        here = _follow(here, root)
        if not here.keys() - {"title"}:
            return _ANYTHING
        if part in here.get("properties", {}):
            here = here["properties"][part]
        elif here.get("type") == "array" and str(part).isdecimal():
            fixed = here.get("prefixItems")
            index = int(part)
            if fixed:
                here = fixed[index] if index < len(fixed) else {}
            else:
                here = here["items"]
        elif isinstance(here.get("additionalProperties"), Mapping):
            here = here["additionalProperties"]
        elif here.get("additionalProperties") is not False and here.get("type") == "object":
            return _ANYTHING
        else:
            return {}
    return _follow(here, root)


def _follow(schema: Schema, root: Schema) -> Schema:
    """Return `schema`, or what it refers to."""
    while "$ref" in schema:
        schema = root["$defs"][schema["$ref"].rsplit("/", 1)[1]]
    return schema


def _describe(schema: Schema, root: Schema) -> str:
    schema = _follow(schema, root)
    if "anyOf" in schema:
        return " or ".join(_describe(choice, root) for choice in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(str(choice) for choice in schema["enum"])
    if "const" in schema:
        return str(schema["const"])
    match schema.get("type"):
        case "integer":
            return "a whole number" + _range(schema)
        case "number":
            return "a number" + _range(schema)
        case "string":
            if "pattern" in schema:
                return f"text that matches {schema['pattern']}"
            return "text that is not empty" if schema.get("minLength") else "text"
        case "boolean":
            return "true or false"
        case "null":
            return "null"
        case "array":
            fixed = schema.get("prefixItems")
            if fixed:
                return f"a list of {len(fixed)}, each {_describe(fixed[0], root)}"
            least = f" with at least {schema['minItems']} item" if schema.get("minItems") else ""
            return f"a list{least}, each {_describe(schema['items'], root)}"
        case "object":
            keys = ", ".join(schema.get("properties", {}))
            return f"a mapping with the keys {keys}" if keys else "a mapping"
    return "a value that JSON can hold"


def _range(schema: Schema) -> str:
    """Return the bounds of a number, in words."""
    shown = {key: f"{value:.12g}" if isinstance(value, float) else value for key, value in schema.items()}
    words = []
    if "minimum" in shown and "maximum" in shown:
        words.append(f"from {shown['minimum']} to {shown['maximum']}")
    else:
        words += [f"at least {shown['minimum']}"] if "minimum" in shown else []
        words += [f"at most {shown['maximum']}"] if "maximum" in shown else []
    words += [f"above {shown['exclusiveMinimum']}"] if "exclusiveMinimum" in shown else []
    words += [f"below {shown['exclusiveMaximum']}"] if "exclusiveMaximum" in shown else []
    words += [f"a multiple of {shown['multipleOf']}"] if "multipleOf" in shown else []
    return " " + " and ".join(words) if words else ""


def _value_at(given: object, loc: Sequence[int | str]) -> object:
    """Return what the user gave at `loc`; None if the path leads nowhere."""
    for part in loc:
        if part == "[key]":
            continue
        try:
            given = given[part]  # type: ignore[index]  # whatever cannot be followed ends in None
        except (TypeError, KeyError, IndexError):
            return None
    return WEBHOOK if loc[:1] == ("alerts",) and (loc[-1] == "url" or "//" in str(given)) else given

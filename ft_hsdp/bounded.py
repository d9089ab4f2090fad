"""Bounded: pydantic's checks of documents from outside, at a cost that is linear in their bytes.

Pydantic looks at every item of a list or a mapping and collects what is wrong with each, so a document of wrong
items costs a hundred times more than a right one of its size. Here the first wrong item of a list ends the check,
mappings whose items can be wrong are short, and errors are never formatted whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError, SchemaValidator, core_schema

MAX_KEYS = 1 << 12
SHOWN = 120  # characters of what is wrong

_LISTS = ("list", "tuple", "set", "frozenset")
_OPAQUE = ("metadata", "serialization", "cls", "ref", "schema_ref", "config", "default")


def checker(kind: Any) -> SchemaValidator:
    """What validates documents of ``kind``, a dataclass or any other type that pydantic knows."""
    return SchemaValidator(_bounded(TypeAdapter(kind).core_schema))


def complaint(error: ValidationError) -> str:
    """The first thing that is wrong, on one short line: where, and what."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(each)[:SHOWN] for each in first["loc"])
    return f"{where or 'body'}: {first['msg']}"[:SHOWN]


def _bounded(schema: Any) -> Any:
    """The same schema, whose lists fail at their first wrong item and whose mappings are short."""
    if isinstance(schema, list | tuple):
        return type(schema)(_bounded(each) for each in schema)
    if not isinstance(schema, dict):
        return schema
    changed = {key: each if key in _OPAQUE else _bounded(each) for key, each in schema.items()}
    kind = changed.get("type")
    if kind in _LISTS:
        changed["fail_fast"] = True
    if (kind == "dict" and _checks_items(changed)) or _forbids(changed):
        return core_schema.no_info_before_validator_function(_short, changed)
    return changed


def _checks_items(schema: dict[str, Any]) -> bool:
    """Whether a mapping's items can be wrong: the names of a JSON object are always strings."""
    names, values = (schema.get(side, {}).get("type", "any") for side in ("keys_schema", "values_schema"))
    return names not in ("any", "str") or values != "any"


def _forbids(schema: dict[str, Any]) -> bool:
    """Whether each name that is not known is an error of its own."""
    config = schema.get("config")
    return isinstance(config, dict) and config.get("extra_fields_behavior") == "forbid"


def _short(document: Any) -> Any:
    if isinstance(document, Mapping) and len(document) > MAX_KEYS:
        raise PydanticCustomError("too_long", "a mapping is too long")
    return document

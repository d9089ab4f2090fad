"""Checks documents from outside with pydantic, at a cost that is linear in their bytes.

`MessageCodec` is the one encoding of messages: the protocol's and those of the state agent.

Pydantic looks at every item of a list or a mapping and collects what is wrong with each, so a document of wrong
items costs a hundred times more than a right one of its size. Here the first wrong item of a list ends the check,
mappings whose items can be wrong are short, and errors are never formatted as a whole.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError, SchemaValidator, core_schema

from ft_hsdp.errors import ProtocolViolation

MAX_KEYS = 1 << 12
SHOWN = 120  # characters of what is wrong

_TAG = re.compile(rb'\s*\{\s*"type"\s*:\s*"(\w{1,40})"')  # of a message
_to_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode

_LISTS = ("list", "tuple", "set", "frozenset")
_OPAQUE = ("metadata", "serialization", "cls", "ref", "schema_ref", "config", "default")


def checker(kind: Any) -> SchemaValidator:
    """Return a validator for documents of `kind`, a dataclass or any other type that pydantic knows."""
    return SchemaValidator(_bounded(TypeAdapter(kind).core_schema))


def complaint(error: ValidationError) -> str:
    """Return the first thing that is wrong with a document, on one short line: where, and what."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(ascii(each)[:SHOWN].strip("'") for each in first["loc"])
    return f"{where or 'body'}: {first['msg']}"[:SHOWN]


class MessageCodec:
    """Encodes dataclasses as JSON `{"type": tag, "body": fields}`, and decodes and checks them. Thread-safe.

    Args:
        types: the class of each tag. A class may get another name; a tag may not: peers and stored files use it.
        max_bytes: longest message that `decode` accepts.
    """

    def __init__(self, types: Mapping[str, type], max_bytes: int) -> None:
        self._types = types
        self._tags = {cls: tag for tag, cls in types.items()}
        self._max_bytes = max_bytes
        # Each takes milliseconds to build, so it is built on first use.
        self._adapter = functools.cache(self._build_adapter)
        self._document = functools.cache(self._build_document)

    def tag_of(self, message_type: type) -> str:
        return self._tags[message_type]

    def prepare(self, *types: type) -> None:
        """Build the encoders and validators of `types` now, or those of all types.

        Otherwise the first message of each type waits milliseconds, in each process.
        """
        for tag in map(self.tag_of, types) if types else self._types:
            self._document(tag)

    def body(self, message: object) -> Any:
        """Return the fields of a message as they stand in the JSON: dicts, lists, str, int, float, bool, None."""
        return self._adapter(self._tags[type(message)]).serializer.to_python(message, mode="json")

    def encode(self, message: object) -> bytes:
        """Return a message as JSON. A lone surrogate, as in a file's name, becomes "?": `decode` refuses it."""
        document = {"type": self._tags[type(message)], "body": self.body(message)}
        return _to_json(document).encode(errors="replace")

    def decode(self, data: bytes, *expected: type) -> Any:
        """Return the message in `data`. The cost is linear in the bytes.

        Args:
            data: what `encode` made, or anything that a stranger sent. Its "type" comes first.
            *expected: classes that are accepted here.

        Returns:
            An instance of one of `expected`.

        Raises:
            ProtocolViolation: `data` is too long, not JSON, of another class, or not valid.
        """
        if len(data) > self._max_bytes:
            raise ProtocolViolation(f"message of {len(data)} bytes; allowed: {self._max_bytes}")
        named = _TAG.match(data)
        tag = named[1].decode() if named is not None else ""
        if not tag:
            raise ProtocolViolation("not a valid message: it does not begin with its type")
        if self._types.get(tag) not in expected:
            raise ProtocolViolation(f"message {tag!r} is not expected here")
        try:
            return self._document(tag).validate_json(data)["body"]
        except ValidationError as error:
            why = complaint(error).removeprefix("body.")
            raise ProtocolViolation(f"not a valid message: {tag}: {why}") from None

    def _build_adapter(self, tag: str) -> TypeAdapter[Any]:
        return TypeAdapter(self._types[tag])

    def _build_document(self, tag: str) -> SchemaValidator:
        """Build what checks a whole document of one class, its JSON included, at once."""
        body: Any = self._adapter(tag).core_schema
        shared = body["definitions"] if body["type"] == "definitions" else []
        fields = {"type": core_schema.literal_schema([tag]), "body": body["schema"] if shared else body}
        document = core_schema.typed_dict_schema({n: core_schema.typed_dict_field(f) for n, f in fields.items()})
        return SchemaValidator(_bounded(core_schema.definitions_schema(document, shared)))


def _bounded(schema: Any) -> Any:
    """Return the same schema, with lists that fail at their first wrong item and mappings that are short."""
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
    """Return whether the items of a mapping can be wrong. The names of a JSON object are always strings."""
    names, values = (schema.get(side, {}).get("type", "any") for side in ("keys_schema", "values_schema"))
    return names not in ("any", "str") or values != "any"


def _forbids(schema: dict[str, Any]) -> bool:
    """Return whether each unknown name is an error of its own."""
    config = schema.get("config")
    return isinstance(config, dict) and config.get("extra_fields_behavior") == "forbid"


def _short(document: Any) -> Any:
    if isinstance(document, Mapping) and len(document) > MAX_KEYS:
        raise PydanticCustomError("too_long", "a mapping is too long")
    return document

"""Writes YAML with comments, and quotes text that a reader of YAML could take for another type."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_PLAIN = re.compile(r"[A-Za-z/](?:[A-Za-z0-9_./-]|:(?=[A-Za-z0-9_./-]))*")
_WORDS = frozenset(["y", "n", "yes", "no", "true", "false", "on", "off", "null", "nan", "inf"])


@dataclass(frozen=True, slots=True)
class CommentedValue:
    text: str  # the comment; it may have several lines
    value: Any


def document(value: Mapping[str, Any]) -> str:
    """Return `value` as a YAML document, keys in their order, with a newline at the end."""
    return "".join(f"{line}\n" for line in _lines(value, ""))


def comment(text: str) -> str:
    """Return `text` as lines of a comment."""
    return "".join(f"# {line}".rstrip() + "\n" for line in text.splitlines())


def scalar(value: object) -> str:
    """Return `value` on one line; text that could be read as another type gets quotes."""
    if isinstance(value, str):
        plain = _PLAIN.fullmatch(value) and value.lower() not in _WORDS
        return value if plain else json.dumps(value, ensure_ascii=False)
    if isinstance(value, float):
        digits = repr(value)
        return digits if "." in digits else digits.replace("e", ".0e")  # some readers take 1e-08 for text
    return json.dumps(value)


def _lines(value: Mapping[str, Any] | Sequence[Any], indent: str) -> Iterator[str]:
    """Yield the lines of a mapping or a list that is not empty."""
    pairs = value.items() if isinstance(value, Mapping) else ((None, each) for each in value)
    for key, each in pairs:
        if isinstance(each, CommentedValue):
            yield from (f"{indent}# {line}" for line in each.text.splitlines())
            each = each.value
        head = "-" if key is None else f"{scalar(key)}:"
        if isinstance(each, str) and "\n" in each:
            yield f"{indent}{head} |{'' if each.endswith(chr(10)) else '-'}"
            yield from (f"{indent}  {line}" if line else "" for line in each.splitlines())
        elif isinstance(each, Mapping | Sequence) and not isinstance(each, str) and each:
            inside = list(_lines(each, f"{indent}  "))
            if key is None and isinstance(each, Mapping) and not inside[0].lstrip().startswith("#"):
                yield f"{indent}- {inside[0].lstrip()}"
                yield from inside[1:]
            else:
                yield f"{indent}{head}"
                yield from inside
        elif isinstance(each, Mapping):
            yield f"{indent}{head} {{}}"
        elif isinstance(each, Sequence) and not isinstance(each, str):
            yield f"{indent}{head} []"
        else:
            yield f"{indent}{head} {scalar(each)}"

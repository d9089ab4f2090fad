"""The little of Protocol Buffers that a member of torchft's quorum says and hears."""

from __future__ import annotations

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


def varint(value: int) -> bytes:
    """A number, 7 bits a byte, least first."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def number(field: int, value: int) -> bytes:
    """A field that holds a number >= 0."""
    return varint(field << 3 | VARINT) + varint(value)


def text(field: int, value: str | bytes) -> bytes:
    """A field that holds text or a message."""
    data = value.encode() if isinstance(value, str) else value
    return varint(field << 3 | BYTES) + varint(len(data)) + data


def counted(message: bytes, outer: int, inner: int) -> int:
    """How many fields `inner` are in the field `outer` of `message`."""
    return sum(1 for body in _fields(message, outer) for _ in _fields(body, inner))


def _fields(message: bytes, wanted: int) -> list[bytes]:
    """The contents of all fields `wanted` that hold bytes."""
    found, at = [], 0
    while at < len(message):
        key, at = _read(message, at)
        kind = key & 7
        if kind == VARINT:
            _, at = _read(message, at)
            continue
        size = {FIXED64: 8, FIXED32: 4}.get(kind)
        if size is None:
            size, at = _read(message, at)
        if key >> 3 == wanted:
            found.append(message[at : at + size])
        at += size
    return found


def _read(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at

import dataclasses
import functools
import json
import string
from dataclasses import replace
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ft_hsdp import bounded, protocol
from ft_hsdp.core import effects
from ft_hsdp.core.commit import AttemptId
from ft_hsdp.core.grant import Grant, Member
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import ProtocolViolation
from ft_hsdp.state.agent import messages

TOKEN = "0" * 64
EVERYTHING = tuple(protocol.MESSAGES.values())

words = st.text(st.sampled_from(string.ascii_letters + string.digits + 'é"\\\n'), max_size=8)
counts = st.integers(0, 2**40)
floats = st.floats(allow_nan=False, allow_infinity=False)
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    int: counts,
    float: floats,
    str: words,
    bool: st.booleans(),
    type(None): st.none(),
    Any: counts | floats | words,
}
BOUNDED = {int: st.integers(1, 4096), float: st.floats(0, 1e9), str: st.text(string.ascii_letters, min_size=1)}


@functools.cache
def values(kind: Any) -> st.SearchStrategy[Any]:
    """What a field of this type may hold; a message is made of its fields."""
    origin, inside = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"):
        fields = get_type_hints(kind, include_extras=True)
        return st.builds(kind, **{name: values(field) for name, field in fields.items()})  # type: ignore[arg-type]
    if origin is Annotated:
        return BOUNDED[inside[0]] if inside[0] in BOUNDED else values(inside[0])
    if origin is Literal:
        return st.sampled_from(inside)
    if origin is dict:
        return st.dictionaries(*map(values, inside), max_size=3)
    if origin is tuple and inside[-1] is ...:
        return st.lists(values(inside[0]), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, inside))
    return PLAIN[kind] if kind in PLAIN else st.one_of(*map(values, inside))


GRANT = Grant(1, 7, StateId(6, 12, "abc"), (Member(0, "0-a", "contribute", ("h:1",), ("h:2",)),), 3, "why")


@pytest.mark.parametrize("kind", EVERYTHING, ids=lambda k: k.__name__)
def test_every_message_survives_the_wire(kind: type) -> None:
    @given(values(kind))
    def round_trip(message: Any) -> None:
        data = protocol.encode(message)
        back = protocol.decode(data, kind)
        assert type(back) is kind
        assert back == message
        assert protocol.encode(back) == data, "what equality does not compare survives too"
        framed = protocol.frame(message)
        assert framed[4:] == data
        assert protocol.LENGTH.unpack(framed[:4]) == (len(data),)

    round_trip()


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "null",
            "[]",
            "7",
            '"Ask"',
            "{}",
            '{"type": 3}',
            '{"type": "Wait"}',
            '{"type": ["Wait"], "body": {}}',
        ),
        *("[" * 100_000, '{"a":' * 50_000, "9" * 10_000),
        *('{"type": "RunBatch", "body": {"step": 1e999}}', '{"type": "RunBatch", "body": {"step": "soon"}}'),
    ],
)
def test_what_is_no_message_is_refused(text: str) -> None:
    with pytest.raises(ProtocolViolation):
        protocol.decode(text.encode(), protocol.Wait, effects.RunBatch)


def test_a_message_has_a_size_limit_that_is_checked_first() -> None:
    limit = protocol.MAX_MESSAGE
    fits = protocol.encode(protocol.Wait("x" * (limit - 100)))
    assert len(fits) < limit
    assert protocol.decode(fits, protocol.Wait).reason[:1] == "x"
    with pytest.raises(ProtocolViolation, match=f"message of {limit + 1} bytes"):
        protocol.decode(b"x" * (limit + 1), protocol.Wait)


def test_a_frame_has_a_size_limit_that_is_known_before_its_bytes() -> None:
    assert protocol.frame_length(protocol.framed(b"abc")[: protocol.LENGTH.size]) == 3
    assert protocol.frame_length(protocol.LENGTH.pack(16), 16) == 16
    with pytest.raises(ProtocolViolation, match="frame of 17 bytes; allowed: 16"):
        protocol.frame_length(protocol.LENGTH.pack(17), 16)
    with pytest.raises(ProtocolViolation):
        protocol.frame_length(protocol.LENGTH.pack(protocol.MAX_MESSAGE + 1))


def test_messages_of_the_state_agent_are_checked_as_all_are() -> None:
    take = messages.Take(StateId(1, 2, "a"))
    data = messages.frame(take)[protocol.LENGTH.size :]
    assert json.loads(data)["type"] == "Take"
    assert messages.decode(data, messages.Take) == messages.decode(data, *messages.ORDERS["snapshots"]) == take
    with pytest.raises(ProtocolViolation, match="'Take' is not expected here"):
        messages.decode(data, messages.Done, messages.OrderRefused)
    for expected in (messages.ORDERS["snapshots"], (messages.Pin,)):
        with pytest.raises(ProtocolViolation, match=r"Pin: .*seconds"):
            messages.decode(data.replace(b'"Take"', b'"Pin"'), *expected)
        with pytest.raises(ProtocolViolation, match=f"allowed: {messages.MAX_MESSAGE}"):
            messages.decode(b" " * messages.MAX_MESSAGE + data, *expected)


def test_a_text_with_a_lone_surrogate_reaches_the_receiver_all_the_same() -> None:
    said = protocol.encode(protocol.Wait("no file \udcff \N{SNOWMAN}"))
    assert protocol.decode(said, protocol.Wait) == protocol.Wait("no file ? \N{SNOWMAN}")


def test_a_message_of_another_type_is_not_let_in() -> None:
    data = protocol.encode(effects.Exit(0, "all is well"))
    assert protocol.decode(data, effects.Exit) == effects.Exit(0, "all is well")
    with pytest.raises(ProtocolViolation, match="'Exit' is not expected here"):
        protocol.decode(data, protocol.Wait, Grant)
    with pytest.raises(ProtocolViolation):
        protocol.decode(data)


def test_a_missing_or_mistyped_field_is_named() -> None:
    with pytest.raises(ProtocolViolation, match="Wait"):
        protocol.decode(b'{"type": "Wait", "body": {}}', protocol.Wait)
    with pytest.raises(ProtocolViolation):
        protocol.decode(b'{"type": "Reduce", "body": {"fence": {}, "role": "king", "prev": ""}}', effects.Reduce)


@pytest.mark.parametrize(
    "forged",
    [
        {"term": 2},
        {"epoch": 8},
        {"base": StateId(6, 13, "abc")},
        {"members": ()},
        {"members": (replace(GRANT.members[0], role="behind"),)},
        {"members": (replace(GRANT.members[0], incarnation="0-b"),)},
        {"members": (replace(GRANT.members[0], ring=("evil:1",)),)},
        {"members": (replace(GRANT.members[0], state=("evil:1",)),)},
        {"total": 4},
        {"reason": "because"},
        {"void": (AttemptId(6, 13, 0),)},
        {"mac": ""},
        {"mac": "0" * 64},
        *({"mac": odd} for odd in ("é", "\ud800", "\0", "x" * 1000)),
    ],
    ids=lambda f: next(iter(f)),
)
def test_a_changed_grant_is_found_out(forged: dict[str, Any]) -> None:
    with pytest.raises(ProtocolViolation, match="wrong MAC"):
        protocol.verify(TOKEN, replace(protocol.sign(TOKEN, GRANT), **forged))


def test_another_job_cannot_sign() -> None:
    with pytest.raises(ProtocolViolation, match="epoch 7 has a wrong MAC"):
        protocol.verify(TOKEN, protocol.sign("1" * 64, GRANT))


@given(values(Grant))
def test_any_grant_can_be_signed(grant: Grant) -> None:
    signed = protocol.sign(TOKEN, grant)
    protocol.verify(TOKEN, signed)
    protocol.verify(TOKEN, protocol.decode(protocol.encode(signed), Grant))
    assert replace(signed, mac=grant.mac) == grant


@given(words, words)
def test_a_mac_tells_its_parts_apart(a: str, b: str) -> None:
    assert protocol.mac(TOKEN, a, b) == protocol.mac(TOKEN, a, b)
    assert protocol.mac(TOKEN, a, b) != protocol.mac(TOKEN, a + b)
    assert protocol.genuine(TOKEN, protocol.mac(TOKEN, a, b), a, b)
    assert not protocol.genuine(TOKEN, protocol.mac(TOKEN, a, b), a, b + "!")


ANY_LENGTH = bounded.MessageCodec(protocol.MESSAGES, 1 << 30)


def _hostile(size: int) -> dict[str, bytes]:
    """What may stand for a field of any message, as JSON of about ``size`` bytes: all of it is wrong."""
    names = b",".join(b'"k%x":0' % i for i in range(size // 10))
    return {"items": b"[" + b"0," * (size // 2) + b"0]", "names": b"{" + names + b"}", "deep": b"[" * size}


@pytest.mark.parametrize("kind", ["items", "names", "deep"])
@pytest.mark.parametrize("name", sorted(protocol.MESSAGES))
def test_a_wrong_document_has_few_errors_however_long_it_is(name: str, kind: str) -> None:
    """Pydantic would collect one for each item: 1 MiB of them took more than a second and half a GB."""
    wrong = _hostile(1 << 16)[kind]
    fields = [field.name for field in dataclasses.fields(protocol.MESSAGES[name])]
    body = b"{" + b",".join(b'"%s":%s' % (field.encode(), wrong) for field in fields) + b"}"
    for document in (body, body.replace(wrong, b'{"members":' + wrong + b"}")):
        data = b'{"type":"%s","body":%s}' % (name.encode(), document)
        cause: BaseException | None = None
        try:
            ANY_LENGTH.decode(data, protocol.MESSAGES[name])
        except ProtocolViolation as error:
            cause = error.__context__
        assert cause is None or (isinstance(cause, ValidationError) and cause.error_count() < 50)


@given(st.lists(st.integers(0, 10**18 - 1), min_size=6, max_size=6))
def test_a_heartbeat_has_a_short_way_to_the_same_bytes(numbers: list[int]) -> None:
    beat = protocol.RingBeat(*numbers)
    assert protocol.beat_frame(*numbers) == protocol.frame(beat)
    assert protocol.beat_in(protocol.encode(beat)) == beat


def test_what_only_looks_like_a_heartbeat_is_left_to_the_checks() -> None:
    body = protocol.encode(protocol.RingBeat(1, 2, 3))
    for wrong in (b"", b" " + body, body + b" ", body.replace(b"2", b"-2"), body.replace(b"2", b"1" * 19)):
        assert protocol.beat_in(wrong) is None

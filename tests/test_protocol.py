import dataclasses
import json
import string
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ft_hsdp import bounded, protocol
from ft_hsdp.core import commit, effects
from ft_hsdp.core.commit import AttemptId, CommitRecord, CommitToken, Contribution, Vote
from ft_hsdp.core.grant import CatchUp, Continue, Finish, Grant, Member, Refused, Report
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import ProtocolViolation
from ft_hsdp.state.agent import messages

TOKEN = "0" * 64
EVERYTHING = tuple(protocol.MESSAGES.values())

words = st.text(st.sampled_from(string.ascii_letters + string.digits + 'é"\\\n'), max_size=8)
counts = st.integers(0, 2**40)
some = st.integers(0, 12)
rows = st.lists(some, max_size=3).map(tuple)
floats = st.floats(allow_nan=False, allow_infinity=False)
addresses = st.lists(words, max_size=2).map(tuple)
states = st.builds(StateId, counts, counts, words)
fences = st.builds(AttemptId, counts, counts, some)
contributions = st.builds(Contribution, some, some, some, counts, floats)
batches = st.lists(contributions, max_size=3).map(tuple)
records = st.builds(
    CommitRecord, counts, some, counts, words, rows, some, batches, words, floats, floats, some, rows
)
members = st.builds(Member, some, words, st.sampled_from(["contribute", "behind"]), addresses, addresses)
crews = st.lists(members, max_size=3).map(tuple)
grants = st.builds(
    Grant,
    counts,
    counts,
    states,
    crews,
    some,
    words,
    st.lists(fences, max_size=2).map(tuple),
    some,
    st.booleans(),
    some,
    words,
)
maybe = st.none
reports = st.builds(
    Report,
    some,
    words,
    states,
    counts,
    counts,
    counts,
    counts,
    maybe() | records,
    maybe() | fences,
    maybe() | states,
    rows,
    rows,
    rows,
    rows,
    rows,
)
digests = st.lists(st.tuples(some, words), max_size=3).map(tuple)
tokens = st.builds(
    CommitToken, fences, st.booleans(), st.booleans(), words, rows, rows, digests, rows, rows, words
)
votes = st.builds(
    Vote, some, fences, words, floats, batches, rows, words, st.booleans(), st.booleans(), floats, counts
)

MESSAGES: dict[type, st.SearchStrategy[Any]] = {
    protocol.QuorumRequest: st.builds(
        protocol.QuorumRequest, reports, addresses, addresses, words, words, frozen=words
    ),
    protocol.Wait: st.builds(protocol.Wait, words),
    protocol.ProcessReport: st.builds(
        protocol.ProcessReport, st.dictionaries(some, maybe() | words, max_size=3), addresses, rows
    ),
    protocol.SupervisorReply: st.builds(
        protocol.SupervisorReply,
        counts,
        counts,
        st.booleans(),
    ),
    protocol.Telemetry: st.builds(
        protocol.Telemetry,
        words,
        st.lists(st.dictionaries(words, floats | some | words, max_size=3), max_size=2).map(tuple),
        st.lists(st.dictionaries(words, floats, max_size=3), max_size=2).map(tuple),
        st.lists(st.builds(protocol.RankBeat, some, some, words, counts), max_size=2).map(tuple),
        counts,
        st.lists(st.dictionaries(words, floats, max_size=3), max_size=2).map(tuple),
    ),
    protocol.RankHello: st.builds(protocol.RankHello, some, words, words),
    protocol.RankBroken: st.builds(protocol.RankBroken, some, counts, words, maybe() | some, st.booleans()),
    protocol.RankShown: st.builds(protocol.RankShown, some, grants),
    protocol.RankStopped: st.builds(protocol.RankStopped, some, counts),
    protocol.RankLeaves: st.builds(protocol.RankLeaves, some),
    protocol.RankAlive: st.builds(protocol.RankAlive, some),
    protocol.RankFetched: st.builds(protocol.RankFetched, some, states, st.booleans()),
    protocol.Settled: st.builds(
        protocol.Settled, states, st.booleans(), floats, counts, floats, st.just(((2, 1),))
    ),
    protocol.ShardLeftOut: st.builds(protocol.ShardLeftOut, fences),
    protocol.RankFetchFailed: st.builds(protocol.RankFetchFailed, some, states, words),
    protocol.RankCheckpointed: st.builds(protocol.RankCheckpointed, some, states),
    protocol.RankCheckpointFailed: st.builds(protocol.RankCheckpointFailed, some, states, words),
    protocol.StoreCall: st.builds(
        protocol.StoreCall,
        *(some, counts, st.sampled_from(["set", "count"]), addresses, addresses, some, st.floats(0, 1e9)),
    ),
    protocol.StoreAnswer: st.builds(protocol.StoreAnswer, counts, some, words, words),
    protocol.RingHello: st.builds(protocol.RingHello, grants, some, some, words, words, addresses, some),
    protocol.RingWelcome: st.builds(protocol.RingWelcome, counts, st.booleans(), words, words, words),
    protocol.RingData: st.builds(protocol.RingData, words, some, counts),
    protocol.RingReady: st.builds(protocol.RingReady, st.booleans()),
    protocol.RingBarrier: st.builds(protocol.RingBarrier, counts, st.sampled_from([1, 2])),
    protocol.RingBeat: st.builds(protocol.RingBeat, counts, counts, counts),
    protocol.RingAbort: st.builds(
        protocol.RingAbort, counts, words, maybe() | some, maybe() | grants, st.booleans(), st.booleans()
    ),
    Vote: votes,
    commit.CommitToken: tokens,
    Grant: grants,
    Continue: st.builds(Continue, counts, counts),
    CatchUp: st.builds(CatchUp, states, crews, words),
    Finish: st.builds(Finish),
    Refused: st.builds(Refused, words, some),
    effects.Configure: st.builds(effects.Configure, grants),
    effects.StopRing: st.builds(effects.StopRing, counts, words),
    effects.Reduce: st.builds(effects.Reduce, fences, st.sampled_from(["contribute", "behind"]), words),
    effects.Commit: st.builds(effects.Commit, records),
    effects.BufferUpdate: st.builds(effects.BufferUpdate, records),
    effects.DropGradient: st.builds(effects.DropGradient, words),
    effects.InstallSnapshot: st.builds(effects.InstallSnapshot, states),
    effects.RunBatch: st.builds(effects.RunBatch, counts),
    effects.Fetch: st.builds(effects.Fetch, states, crews),
    effects.Keep: st.builds(effects.Keep, states),
    effects.WriteCheckpoint: st.builds(effects.WriteCheckpoint, states),
    effects.DropSnapshots: st.builds(effects.DropSnapshots),
    effects.DropCopies: st.builds(effects.DropCopies, rows),
    effects.Exit: st.builds(effects.Exit, some, words),
}

GRANT = Grant(1, 7, StateId(6, 12, "abc"), (Member(0, "0-a", "contribute", ("h:1",), ("h:2",)),), 3, "why")


def test_every_message_is_covered_here() -> None:
    assert set(MESSAGES) == set(EVERYTHING)


@pytest.mark.parametrize("kind", EVERYTHING, ids=lambda k: k.__name__)
def test_every_message_survives_the_wire(kind: type) -> None:
    @given(MESSAGES[kind])
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
    ["", "null", "[]", "7", '"Ask"', "{}", '{"type": 3}', '{"type": "Wait"}', '{"type": ["Wait"], "body": {}}'],
)
def test_what_is_no_message_is_refused(text: str) -> None:
    with pytest.raises(ProtocolViolation):
        protocol.decode(text.encode(), protocol.Wait)


@pytest.mark.parametrize(
    "data", [b"[" * 100_000, b'{"a":' * 50_000, b"9" * 10_000, b'{"type": "Feed", "body": {"step": 1e999}}']
)
def test_json_that_exhausts_the_parser_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        protocol.decode(data, effects.RunBatch)


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
        protocol.decode(b'{"type": "Feed", "body": {"step": "soon"}}', effects.RunBatch)
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
    ],
    ids=lambda f: next(iter(f)),
)
def test_a_changed_grant_is_found_out(forged: dict[str, Any]) -> None:
    with pytest.raises(ProtocolViolation, match="wrong MAC"):
        protocol.verify(TOKEN, replace(protocol.sign(TOKEN, GRANT), **forged))


def test_another_job_cannot_sign() -> None:
    with pytest.raises(ProtocolViolation, match="epoch 7 has a wrong MAC"):
        protocol.verify(TOKEN, protocol.sign("1" * 64, GRANT))


@given(grants)
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


@pytest.mark.parametrize("mac", ["é", "\ud800", "\0", "x" * 1000])
def test_a_mac_that_is_no_row_of_digits_is_just_wrong(mac: str) -> None:
    with pytest.raises(ProtocolViolation, match="wrong MAC"):
        protocol.verify(TOKEN, replace(GRANT, mac=mac))


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

"""Requests and answers prove a token: whatever is changed, repeated or cut off proves nothing."""

import hashlib
import hmac

import pytest

from ft_hsdp.http_proof import MARK, NONE, SignedRequest, keys_of
from lighthouse.http.proofs import CHALLENGE_S, SignedCalls

TOKEN, ADMIN = "5e" * 32, "ad" * 32
CHALLENGE = "c" * 32
BODY = b'{"finished": true}'


def asked(token: str = TOKEN) -> SignedRequest:
    return SignedRequest(token, CHALLENGE, "POST", b"/v1/processes", b"{}")


def answer(request: SignedRequest, token: str = TOKEN, status: int = 200, body: bytes = BODY) -> str:
    """The header of a lighthouse that knows ``token``."""
    mac = request.authorization.rpartition(" ")[2].encode()
    return f"{CHALLENGE} {keys_of(token).answer(mac, CHALLENGE.encode(), status, body).decode()}"


def test_the_macs_are_hmac_sha256_under_derived_keys() -> None:
    """The figure by which another implementation, as the page's, can be checked."""
    key = hmac.digest(TOKEN.encode(), b"ft_hsdp http 1 request", "sha256")
    request = asked()
    _, _, challenge, nonce, body, mac = request.authorization.split()
    said = f"POST /v1/processes {challenge} {nonce} {body}".encode()
    assert body == hashlib.sha256(b"{}").hexdigest()
    assert mac == hmac.new(key, said, "sha256").hexdigest()
    assert TOKEN not in request.authorization


def test_an_answer_of_who_knows_the_token_is_proved_and_brings_the_challenge() -> None:
    request = asked()
    assert request.challenge(answer(request), 200, BODY) == CHALLENGE


def test_any_other_answer_is_not() -> None:
    request, other = asked(), asked()
    good = answer(request)
    challenge, _, mac = good.partition(" ")
    forged = [
        (None, 200, BODY),
        ("", 200, BODY),
        (good, 401, BODY),
        (good, 200, BODY + b" "),
        (good, 200, b""),
        (good[:-1], 200, BODY),
        (mac, 200, BODY),
        (f"{'d' * 32} {mac}", 200, BODY),
        (f"{challenge} {'0' * 64}", 200, BODY),
        (f"{challenge} \xe9", 200, BODY),
        (answer(request, ADMIN), 200, BODY),
        (answer(other), 200, BODY),
        (f"{CHALLENGE} {request.authorization.rpartition(' ')[2]}", 200, BODY),
    ]
    assert [request.challenge(*each) for each in forged] == [None] * len(forged)


@pytest.fixture
def calls() -> SignedCalls:
    made = SignedCalls(lambda: 0.0)
    made.hold([(TOKEN, "worker"), (ADMIN, "admin")])
    return made


def scope(method: str = "POST", path: bytes = b"/v1/processes", query: bytes = b"") -> dict[str, object]:
    return {"type": "http", "method": method, "raw_path": path, "query_string": query}


def challenge_of(calls: SignedCalls) -> str:
    """As a caller learns it: its first request has none."""
    proof = calls.judge(SignedRequest(TOKEN, NONE, "POST", b"/v1/processes").authorization.encode(), scope())
    assert proof is not None
    assert not proof.fresh
    return calls.current.decode()


def test_a_request_is_accepted_once(calls: SignedCalls) -> None:
    request = SignedRequest(ADMIN, challenge_of(calls), "POST", b"/v1/processes").authorization.encode()
    first, again = calls.judge(request, scope()), calls.judge(request, scope())
    assert first is not None
    assert again is not None
    assert (first.role, first.fresh, again.fresh) == ("admin", True, False)


def test_a_changed_or_foreign_request_proves_nothing(calls: SignedCalls) -> None:
    challenge = challenge_of(calls)
    good = SignedRequest(TOKEN, challenge, "POST", b"/v1/processes?x=1").authorization
    words = good.split()
    heads = [*(scope("GET", query=b"x=1"), scope(path=b"/v1/quorum", query=b"x=1"), scope(query=b"x=2"), scope())]
    assert all(calls.judge(good.encode(), head) is None for head in heads)
    there = scope(query=b"x=1")
    others = [" ".join([*words[:n], "0" * len(words[n]), *words[n + 1 :]]) for n in range(len(words))]
    others += [
        good[:-1],
        " ".join(words[:5]),
        good + " x",
        "FT-HMAC",
        "",
        good.replace(words[1], keys_of(ADMIN).key_id),
    ]
    others.append(SignedRequest("00" * 32, challenge, "POST", b"/v1/processes?x=1").authorization)
    assert [calls.judge(other.encode(), there) for other in others] == [None] * len(others)
    assert calls.judge(good.encode(), there) is not None


def test_a_token_that_is_withdrawn_signs_nothing_more(calls: SignedCalls) -> None:
    request = SignedRequest(TOKEN, challenge_of(calls), "POST", b"/v1/processes").authorization.encode()
    calls.hold([(ADMIN, "admin")])
    assert calls.judge(request, scope()) is None


def test_a_challenge_is_valid_for_its_time_and_its_nonces_for_as_long() -> None:
    now = [0.0]
    challenges = SignedCalls(lambda: now[0])
    first = challenges.current
    assert challenges.take(first, b"1")
    now[0] = CHALLENGE_S + 1
    assert challenges.take(first, b"2"), "a long poll may have begun before"
    assert not challenges.take(first, b"1"), "a replay"
    assert challenges.current != first
    now[0] = 2 * CHALLENGE_S + 2
    assert not challenges.take(first, b"3")
    assert not SignedCalls(lambda: now[0]).take(challenges.current, b"1"), "a lighthouse that was started again"


def test_a_part_of_a_stream_is_marked_in_its_place() -> None:
    request = asked()
    mac = request.authorization.rpartition(" ")[2].encode()
    line = keys_of(TOKEN).mark(mac, 1, b"id: 1\n\n").removesuffix(b"\n\n")
    assert line.startswith(MARK)
    assert request.marked(1, b"id: 1\n\n", line)
    assert not request.marked(0, b"id: 1\n\n", line)
    assert not request.marked(1, b"id: 2\n\n", line)
    assert not asked().marked(1, b"id: 1\n\n", line)

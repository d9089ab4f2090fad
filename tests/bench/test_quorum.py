from __future__ import annotations

import json
import socket
import threading
from argparse import Namespace
from contextlib import ExitStack, closing

import pytest

from ft_hsdp.bench import quorum
from ft_hsdp.bench.quorum import Clients, Grpc, Http1, encoded, frame
from ft_hsdp.errors import ConfigError, Retryable
from ft_hsdp.launch.cli import main

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nFT-HMAC: next mac\r\n\r\nhello"


@pytest.mark.multiproc
@pytest.mark.usefixtures("_nothing_left")
def test_both_lighthouses_in_one_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "quorum", "--json", "--members", "2,12", "--rounds", "2"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert len(out.splitlines()) == 1
    assert [row["members"] for row in result["rounds"]] == [2, 12]
    for row in result["rounds"]:
        assert {kind: each["count"] for kind, each in row["rounds"].items()} == {"torchft": 2, "same": 2, "new": 2}
    (same, new) = result["goals"]
    figures = {kind: each["p50_ms"] for kind, each in result["rounds"][1]["rounds"].items()}
    assert same["seen"] == pytest.approx(figures["same"] / figures["torchft"], abs=0.001)
    assert new["seen"] == pytest.approx(figures["new"] / figures["torchft"], abs=0.001)
    assert "\nrounds:\nmembers: 12\n" in err


@pytest.mark.parametrize("members", ["0", "65", "2,x", ","])
def test_numbers_of_members_that_no_job_has(members: str) -> None:
    with pytest.raises(ConfigError, match=r"--members: got .* allowed: numbers from 1 to 64"):
        quorum.options(Namespace(members=members, rounds=1))


def test_the_goal_is_a_ratio_of_medians() -> None:
    rounds = {"torchft": {"p50_ms": 2.0}, "same": {"p50_ms": 2.5}, "new": {"p50_ms": 2.6}}
    small, large = ({"members": members, "rounds": rounds} for members in (3, 64))
    assert [(v.members, v.seen, v.met) for v in quorum.goals({"rounds": [small, large]})] == [
        (64, 1.25, True),
        (64, 1.3, False),
    ]


def test_an_answer_over_http_that_comes_in_pieces() -> None:
    wire = Http1("host", "/v1/quorum", "token", "challenge")
    asked = wire.request(b"ab")
    assert b"\r\nContent-Length: 2\r\nAuthorization: FT-HMAC " in asked
    assert b" challenge " in asked
    assert asked.endswith(b"\r\n\r\nab")
    pieces = [ANSWER[i : i + 7] for i in range(0, len(ANSWER), 7)]
    answers = [wire.feed(piece)[0] for piece in pieces]
    assert answers == [None] * (len(pieces) - 1) + [b"hello"]
    assert b" next " in wire.request(b"ab")
    with pytest.raises(Retryable, match="401"):
        wire.feed(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n")


def test_a_call_over_grpc_that_comes_in_pieces() -> None:
    wire = Grpc("host", "/a.B/C")
    first, second = wire.request(b"x"), wire.request(b"y")
    assert (first[5:9], second[5:9]) == (b"\0\0\0\1", b"\0\0\0\3")
    message = b"\0\0\0\0\5hello"
    settings, ping = frame(quorum.SETTINGS, 0, 0, b""), frame(quorum.PING, 0, 0, b"12345678")
    data = frame(quorum.DATA, 0, 3, message[:6]) + frame(quorum.DATA, 0, 3, message[6:])
    end = frame(quorum.HEADERS, quorum.END_STREAM | quorum.END_HEADERS, 3, b"trailers")
    answers, said = [], b""
    stream = settings + ping + data + end
    for at in range(0, len(stream), 5):
        answer, reply = wire.feed(stream[at : at + 5])
        answers.append(answer)
        said += reply
    assert [a for a in answers if a is not None] == [b"hello"]
    assert answers[-1] == b"hello"
    acknowledged = frame(quorum.SETTINGS, quorum.ACK, 0, b"") + frame(quorum.PING, quorum.ACK, 0, b"12345678")
    assert said.startswith(acknowledged)


def test_a_call_that_fails_is_no_answer() -> None:
    wire = Grpc("host", "/a.B/C")
    wire.request(b"x")
    with pytest.raises(Retryable, match="the call failed"):
        wire.feed(frame(quorum.HEADERS, quorum.END_STREAM, 1, b"grpc-status: 14"))


def test_messages_are_encoded_as_protocol_buffers() -> None:
    assert encoded(4, 300) == b"\x20\xac\x02"  # the example of their documentation, as field 4
    assert encoded(2, "testing") == b"\x12\x07testing"
    assert encoded(1, encoded(5, 1)) == b"\x0a\x02\x28\x01"


def test_a_server_that_hangs_up_ends_the_round() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:

        def hang_up() -> None:
            sock, _ = listener.accept()
            sock.recv(10)
            sock.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        with ExitStack() as stack, pytest.raises((Retryable, ConnectionResetError)):
            Clients(stack, listener.getsockname(), [Http1("host", "/", "token", "challenge")]).round([b"x"])
        thread.join()

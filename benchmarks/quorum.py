"""`bench quorum`: our lighthouse and torchft's are asked by the same clients, round by round in turns.

All clients are in one thread and ask at once. So that no client's cost is in the figure, requests are made before
the clock starts, an answer counts when its last byte is there, and both protocols are spoken here with as little
as that needs: HTTP/1.1 to our lighthouse, and gRPC to torchft's, which is Protocol Buffers in HTTP/2 frames (RFC
9113). Headers of HTTP/2 are sent as literals that no table remembers (RFC 7541, 6.2.2), so that the bytes of a
request never change.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlsplit

import httpx

from benchmarks.command import listed, measures_of, rounds_of
from benchmarks.processes import LOOPBACK, Process, kill, listening, scratch, spawn
from benchmarks.results import (
    ProgressLog,
    ResultRow,
    Row,
    Verdicts,
    begin_result,
    finish_result,
    interleave,
    most,
    ratio,
    spread,
    version,
)
from ft_hsdp import protocol
from ft_hsdp.config import config_hash, parse
from ft_hsdp.config.running import MAX_REPLICAS
from ft_hsdp.core import state_id
from ft_hsdp.core.grant import Continue, Grant, Report
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import ConfigError, Retryable
from ft_hsdp.http_proof import HEADER, NONE, SignedRequest
from ft_hsdp.launch.backend.processes import tied
from ft_hsdp.launch.run.directory import RunDir, write_job_files

MEMBERS = (3, 12, 64)
STEPS = 10**9
TIMES_MS = (5000, 60_000)  # torchft's own: of a heartbeat, to join
KINDS = {
    "torchft": "torchft's lighthouse (Rust, gRPC, no token, in memory): all members get the quorum",
    "same": "ft_hsdp's, tokens checked: the next step in the same epoch",
    "new": "ft_hsdp's, tokens checked: the ring broke: a new epoch, signed, on disk before all get it",
}

CONNECT_S = 5.0
ROUND_S = 10.0  # longest time of one round
READ = 1 << 18

NUMBER, BYTES = 0, 2  # wire types of Protocol Buffers

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM = ACK = 1
END_HEADERS = 4
WINDOW = 2**31 - 1
FIRST_WINDOW = 65535

_END = b"\r\n\r\n"
_LENGTH = b"\r\ncontent-length:"
_PROOF = f"\r\n{HEADER}:".encode()


GOAL, GOAL_AT = 1.25, (12, 64)  # times torchft's, with so many members
GOALS = {"same": "a round", "new": "a round that makes an epoch durable"}


@dataclass(frozen=True, slots=True)
class QuorumOptions:
    """What `bench quorum` measures."""

    members: tuple[int, ...]  # how many clients ask at once
    rounds: int  # of each kind
    agents: bool = False  # rounds beside host agents, instead of those beside torchft


def options(args: Namespace) -> QuorumOptions:
    """Return what `bench quorum` is to do."""
    allowed = f"numbers from 1 to {MAX_REPLICAS}, e.g. 12,64"
    members = listed("--members", args.members or None, _clients, allowed)
    agents = args.measure is not None and measures_of(args, ("agents",)) == ("agents",)
    return QuorumOptions(members or MEMBERS, rounds_of(args, 300), agents)


def _clients(word: str) -> int | None:
    return int(word) if word.isdecimal() and 1 <= int(word) <= MAX_REPLICAS else None


def goals(result: Row) -> Verdicts:
    """Yield the verdicts on a result of `bench quorum`: ratios of medians."""
    for row in result["rounds"]:
        for kind, text in GOALS.items() if row["members"] in GOAL_AT else ():
            times = ratio(row["rounds"][kind]["p50_ms"], row["rounds"]["torchft"]["p50_ms"])
            yield most(f"{text}, times torchft's", row, GOAL, times)


class LighthouseContender:
    """A lighthouse in a process, and its members."""

    def __init__(self, stack: ExitStack, command: list[str], file: Path, log: Path, count: int) -> None:
        self._begin = stack, command, log
        self._file = file
        self.process = self._start()
        url = str(listening(self.process, file, log, "a lighthouse")["url"])
        self.address = (LOOPBACK, urlsplit(url).port or 0)
        self.host = f"{LOOPBACK}:{self.address[1]}"
        self.members = range(count)

    def _start(self) -> Process:
        stack, command, log = self._begin
        return spawn(stack, command, log)

    def again(self) -> None:
        """Kill it, and start another one."""
        kill(self.process)
        self._file.unlink()
        self.process = self._start()
        listening(self.process, self._file, self._begin[2], "a lighthouse")


class Torchft(LighthouseContender):
    """torchft's lighthouse; a round gives every member the whole quorum."""

    def __init__(self, stack: ExitStack, folder: Path, members: int) -> None:
        self._step = 0
        self._names = [f"replica_{member}:{member:032x}" for member in range(members)]
        file = folder / "torchft.json"
        command = tied("benchmarks.torchft", str(file), *map(str, (*TIMES_MS, members)))
        super().__init__(stack, command, file, folder / "torchft.log", members)
        method = "/torchft.LighthouseService/Quorum"
        self._clients = Clients(stack, self.address, [Grpc(self.host, method) for _ in self.members])
        self.same()

    def same(self) -> float:
        """Return the seconds of a round in which nothing changes."""
        self._step += 1
        seconds, answers = self._clients.round([self._message(n) for n in self.members])
        if any(name.encode() not in answer for answer in answers for name in self._names):
            raise Retryable(f"torchft answered with fewer than {len(self.members)} members")
        return seconds

    def _message(self, member: int) -> bytes:
        store, address = f"127.0.0.1:{28000 + member}", f"http://127.0.0.1:{29000 + member}"
        fields: tuple[str | int, ...] = (self._names[member], address, store, self._step, 1)
        return encoded(1, b"".join(encoded(number, value) for number, value in enumerate(fields, 1)))


class Ours(LighthouseContender):
    """This project's lighthouse, as `launcher.py lighthouse` starts it: tokens, checks, SQLite."""

    def __init__(self, stack: ExitStack, folder: Path, members: int, spare: int = 0) -> None:
        """Start it; so many replicas more may be wanted later."""
        run = self.run = RunDir(folder / "run")
        sizes = {"replicas": members, "max_replicas": members + spare, "ranks_per_replica": 1}
        config = parse({**sizes, "train": {"steps": STEPS}})
        write_job_files(run, config)
        self._token = run.token.read_text().strip()
        self._hash = config_hash(config)
        self._state = StateId(0, 0, state_id.digest("start"))
        self._epoch = 0
        command = tied("lighthouse", "--run", str(run.path))
        super().__init__(stack, command, run.lighthouse, folder / "lighthouse.log", members)
        self._clients = Clients(stack, self.address, [self._wire() for _ in self.members])
        self.new()

    def _wire(self) -> Http1:
        signed = SignedRequest(self._token, NONE, "GET", b"/healthz")
        headers = {"Authorization": signed.authorization}
        answer = httpx.get(f"http://{self.host}/healthz", headers=headers, trust_env=False)
        challenge = signed.challenge(answer.headers.get(HEADER), answer.status_code, answer.content)
        if challenge is None:
            raise Retryable("the lighthouse does not know the token")
        return Http1(self.host, "/v1/quorum", self._token, challenge)

    def same(self) -> float:
        """Return the seconds of a round in which nothing changes: the epoch goes on."""
        step = self._state.step + 1
        self._state = StateId(self._epoch, step, state_id.digest("bench", step))
        seconds, answers = self._clients.round([self._message(n, 0) for n in self.members])
        wanted = protocol.encode(Continue(self._epoch, step + 1))
        if any(answer != wanted for answer in answers):
            raise Retryable(f"the lighthouse answered {answers[0][:200]!r}")
        return seconds

    def new(self) -> float:
        """Return the seconds of a round after the ring broke: a new epoch, durable before a member hears of it."""
        seconds, answers = self._clients.round([self._message(n, self._epoch) for n in self.members])
        grants = [protocol.decode(answer, Grant) for answer in answers]
        if {len(grant.members) for grant in grants} != {len(self.members)} or grants[0].epoch <= self._epoch:
            raise Retryable(f"the lighthouse answered {answers[0][:200]!r}")
        self._epoch = grants[0].epoch
        return seconds

    def _message(self, member: int, after: int) -> bytes:
        report = Report(
            member,
            f"{member}-bench-0",
            self._state,
            self._state.step + 1,
            self._epoch,
            after,
            equal=tuple(range(len(self.members))) if self._epoch else (),
        )
        address = f"127.0.0.1:{29000 + member}"
        return protocol.encode(
            protocol.QuorumRequest(report, (address,), (address,), self._hash, "layout", "numerics")
        )


def run(options: QuorumOptions, stream: TextIO) -> dict[str, Any]:
    """Return the result, ready for JSON; progress goes to ``stream``.

    Raises:
        ConfigError: torchft is not installed.
        Retryable: A lighthouse fails.
    """
    if version("torchft") is None:
        raise ConfigError("bench", "quorum", "an installation with torchft, which it is measured beside")
    log = ProgressLog(stream)
    result, started = begin_result("quorum", log)
    if options.agents:
        from benchmarks import agents  # it needs this module

        with scratch() as (stack, folder):
            row = result["agents"] = agents.measure(stack, folder, options.rounds, log)
        return finish_result(result, agents.goals(row), log, started)
    result["kinds"] = KINDS
    result["rounds"] = [_measure(members, options.rounds, log) for members in options.members]
    return finish_result(result, goals(result), log, started)


def _measure(members: int, rounds: int, log: ProgressLog) -> ResultRow:
    """Return a row: the times of all kinds of rounds with so many members."""
    log.say(f"{members} members")
    with scratch() as (stack, folder):
        torchft, ours = Torchft(stack, folder, members), Ours(stack, folder, members)
        seconds = interleave({"torchft": torchft.same, "same": ours.same, "new": ours.new}, rounds)
    found = {kind: spread(values) for kind, values in seconds.items()}
    for kind, each in found.items():
        log.say(f"  {kind}: {each['p50_ms']:.3g} ms")
    return {"members": members, "rounds": found}


class Http1:
    """Keep-alive requests to ``path``, signed with ``token`` and the ``challenge`` of the last answer."""

    def __init__(self, host: str, path: str, token: str, challenge: str) -> None:
        lines = (f"POST {path} HTTP/1.1", f"Host: {host}", "Content-Type: application/json")
        self._head = "\r\n".join([*lines, "Content-Length: "]).encode()
        self._path = path.encode()
        self._token = token
        self._challenge = challenge
        self._received = bytearray()
        self.greeting = b""  # what is sent first

    def request(self, message: bytes) -> bytes:
        """Return the bytes of a request."""
        signed = SignedRequest(self._token, self._challenge, "POST", self._path, message)
        proof = f"{len(message)}\r\nAuthorization: {signed.authorization}".encode()
        return self._head + proof + _END + message

    def feed(self, data: bytes) -> tuple[bytes | None, bytes]:
        """Take what came; return the answer's body once it is whole. Raises Retryable for a status but 200."""
        self._received += data
        end = self._received.find(_END)
        if end < 0:
            return None, b""
        head = bytes(self._received[:end]).lower()
        if not head.startswith(b"http/1.1 200"):
            raise Retryable(f"the lighthouse answered {bytes(self._received[:200])!r}")
        length = int(_field(head, _LENGTH))
        self._challenge = _field(head, _PROOF).split(b" ")[0].decode()
        whole = end + len(_END) + length
        if len(self._received) < whole:
            return None, b""
        body = bytes(self._received[end + len(_END) : whole])
        del self._received[:whole]
        return body, b""


def _field(head: bytes, name: bytes) -> bytes:
    """Return the value of a header."""
    return head[head.index(name) + len(name) :].split(b"\r\n", 1)[0].strip()


def varint(value: int) -> bytes:
    """Encode a number of Protocol Buffers: 7 bits a byte, least first."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def encoded(field: int, value: int | str | bytes) -> bytes:
    """Encode a field of Protocol Buffers: a number >= 0, a text or a message."""
    if isinstance(value, int):
        return varint(field << 3 | NUMBER) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(field << 3 | BYTES) + varint(len(data)) + data


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Return an HTTP/2 frame."""
    return struct.pack("!I", len(payload))[1:] + struct.pack("!BBI", kind, flags, stream) + payload


def _literal(name: str, value: str) -> bytes:
    """Return a header field as plain text; name and value have less than 127 bytes."""
    return b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


class Grpc:
    """Unary calls of ``method`` ("/package.Service/Method")."""

    def __init__(self, host: str, method: str) -> None:
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": method,
            ":authority": host,
            "content-type": "application/grpc",
            "te": "trailers",
        }
        self._headers = b"".join(_literal(name, value) for name, value in fields.items())
        self._stream = -1
        self._received = bytearray()
        self._body = bytearray()
        windows = frame(SETTINGS, 0, 0, struct.pack("!HI", 4, WINDOW))  # room for all answers to come
        more = frame(WINDOW_UPDATE, 0, 0, struct.pack("!I", WINDOW - FIRST_WINDOW))
        self.greeting = PREFACE + windows + more

    def request(self, message: bytes) -> bytes:
        """Return the bytes of the next call."""
        self._stream += 2
        body = b"\x00" + struct.pack("!I", len(message)) + message
        opening = frame(HEADERS, END_HEADERS, self._stream, self._headers)
        return opening + frame(DATA, END_STREAM, self._stream, body)

    def feed(self, data: bytes) -> tuple[bytes | None, bytes]:
        """Take what came; return the message once its stream has ended, and what must be sent now.

        Raises:
            Retryable: The call failed.
        """
        self._received += data
        reply = bytearray()
        answer = None
        while len(self._received) >= 9:
            length = int.from_bytes(self._received[:3], "big")
            if len(self._received) < 9 + length:
                break
            kind, flags, stream = struct.unpack("!BBI", self._received[3:9])
            payload = bytes(self._received[9 : 9 + length])
            del self._received[: 9 + length]
            if kind == DATA:
                self._body += payload
                reply += frame(WINDOW_UPDATE, 0, 0, struct.pack("!I", length)) if length else b""
            elif kind in (SETTINGS, PING) and not flags & ACK:
                reply += frame(kind, ACK, 0, payload if kind == PING else b"")
            elif kind in (RST_STREAM, GOAWAY):
                raise Retryable(f"the call failed: HTTP/2 frame {kind}, {payload[:100]!r}")
            if kind in (DATA, HEADERS) and flags & END_STREAM and stream == self._stream:
                if len(self._body) < 5:
                    raise Retryable(f"the call failed: {payload[:200]!r}")
                answer = bytes(self._body[5:])
                self._body.clear()
        return answer, bytes(reply)


class Clients:
    """A connection to ``address`` for each of ``wires``, open until ``stack`` ends."""

    def __init__(self, stack: ExitStack, address: tuple[str, int], wires: Sequence[Http1 | Grpc]) -> None:
        self._epoll = stack.enter_context(select.epoll())
        self._socks: list[socket.socket] = []
        self._wires = wires
        self._numbers: dict[int, int] = {}  # of clients by descriptor
        for number, each in enumerate(wires):
            sock = stack.enter_context(socket.create_connection(address, CONNECT_S))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(each.greeting)
            self._socks.append(sock)
            self._numbers[sock.fileno()] = number
            self._epoll.register(sock, select.EPOLLIN)

    def round(self, messages: Sequence[bytes]) -> tuple[float, list[bytes]]:
        """Have each client send its message.

        Returns:
            Seconds from the first byte of the first request to the last byte of the last answer, and the answers.

        Raises:
            Retryable: An answer does not come or is none.
        """
        requests = [wire.request(message) for wire, message in zip(self._wires, messages, strict=True)]
        answers: dict[int, bytes] = {}
        begin = time.perf_counter()
        for sock, data in zip(self._socks, requests, strict=True):
            sock.sendall(data)
        while len(answers) < len(requests):
            ready = self._epoll.poll(max(0.0, begin + ROUND_S - time.perf_counter()))
            if not ready:
                late = len(requests) - len(answers)
                raise Retryable(f"{late} of {len(requests)} answers did not come within {ROUND_S:g} s")
            for descriptor, _ in ready:
                number = self._numbers[descriptor]
                data = self._socks[number].recv(READ)
                if not data:
                    raise Retryable("the lighthouse closed a connection")
                answer, reply = self._wires[number].feed(data)
                if reply:
                    self._socks[number].sendall(reply)
                if answer is not None:
                    answers[number] = answer
        return time.perf_counter() - begin, [answers[number] for number in range(len(requests))]

"""Every parser of bytes from outside, with inputs that it accepts.

As a program it prints what each says to INPUTS inputs: one line of JSON, {parser: [verdict, ...]}.
"""

import asyncio
import atexit
import contextlib
import io
import json
import logging
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import blake3
from uvicorn.config import Config as Uvicorn
from uvicorn.server import ServerState

from ft_hsdp import address, handshake, protocol
from ft_hsdp.config import loader
from ft_hsdp.control import rank_channel
from ft_hsdp.control.key_table import KeyTable, packed
from ft_hsdp.core.commit import AttemptId, CommitRecord, CommitToken, Contribution, Vote
from ft_hsdp.core.grant import Grant, Member, Report
from ft_hsdp.core.host_report import MachineRanks
from ft_hsdp.core.ledger import Ledger
from ft_hsdp.core.ring import RingPlan, operations
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import ConfigError, DataCorruption, ProtocolViolation, StaleEpoch
from ft_hsdp.ftar import connections
from ft_hsdp.ftar import frame as wire_frame
from ft_hsdp.ftar.frame import Entry, FrameOrder, Framing, Key
from ft_hsdp.handshake import Caller, Purpose
from ft_hsdp.launch.run.directory import Tailer
from ft_hsdp.state.agent import messages
from ft_hsdp.state.shared_memory import InMemorySnapshots, SnapshotBuffer
from ft_hsdp.state.transfer import http, shard_manifest
from ft_hsdp.state.transfer.donor_connection import DonorBusy, DonorConnection
from lighthouse import validation
from lighthouse.http import connections as lighthouse_door
from lighthouse.quorum import state as quorum
from tests.support.fuzz.fuzz_engine import Mutator, Parser

TOKEN = "ab" * 32
BASE = StateId(1, 2, "0" * 32)
MEMBERS = tuple(
    Member(r, f"{r}-x-0", "contribute", (f"10.0.0.{r}:80",), (f"[::{r}]:81",), hosts=((f"a/7/n{r}", 1),))
    for r in range(3)
)
GRANT = Grant(1, 3, BASE, MEMBERS, 3, "why", (AttemptId(1, 2, 3),), mac="ab" * 32)
ROW = {"event": "RingConnected", "t": 1.5, "replica": 1}

SAID: list[object] = [
    protocol.QuorumRequest(
        Report(0, "0-x-0", BASE, 3), ("10.0.0.1:80",), ("[::1]:81",), "c", "l", "n", hosts=(("a/7/n0", 1),)
    ),
    *(protocol.Wait("why"), protocol.ProcessReport("0-x-0", MachineRanks("1-x-0", "a", 2, True)), GRANT),
    protocol.SupervisorReply(4, False, "", (1,)),
    protocol.Telemetry("0-x-0", (ROW,), (ROW,), (protocol.RankBeat(0, 7, "here", 5),), 1),
    *(protocol.RankHello(1, "10.0.0.1:80", "10.0.0.1:81"), protocol.RankBroken(1, 2, "why", 0)),
    *(protocol.RankShown(1, GRANT), protocol.RankStopped(1, 2), protocol.RankLeaves(1)),
    *(protocol.RankFetched(1, BASE), protocol.RankFetchFailed(1, BASE, "why"), protocol.RankCheckpointed(1, BASE)),
    *(protocol.StoreCall(1, 2, "set", ("k",), ("AA==",), 3, 4.5), protocol.StoreAnswer(2, 3, "AA==", "why")),
    protocol.RingHello(GRANT, 0, 1, "layout", "host", ("shm", "tcp"), 7),
    *(protocol.RingWelcome(3, False, "tcp", "", "ab" * 16), protocol.RingData("ab" * 16, 0, 99)),
    *(protocol.RingReady(True), protocol.RingBarrier(3, 1), protocol.RingBeat(3, 4, 5)),
    protocol.RingAbort(3, "why", 1, GRANT),
    Vote(1, AttemptId(1, 2, 3), "d", 0.5, ()),
]
TYPES: list[type] = [protocol.MESSAGES[name] for name in sorted(protocol.MESSAGES)]


def _said() -> list[bytes]:
    return [bytes([TYPES.index(type(each))]) + protocol.encode(each) for each in SAID]


def _message(data: bytes) -> None:
    """Each type of message; the first byte says which one."""
    kind = data[0] if data else 0
    if kind < 128:
        protocol.decode(data[1:], TYPES[kind % len(TYPES)])
    else:  # as those do that expect one of several
        protocol.decode(data[1:], *TYPES[kind % 3 :: 3])


def _handshake(data: bytes) -> None:
    if handshake.admit(TOKEN, tuple(Purpose), bytes(handshake.NONCE), data) is not None and data != KNOWN:
        raise AssertionError("let in without the token")
    caller = Caller(TOKEN, Purpose.RING)
    caller.answer(data[: handshake.CHALLENGE_BYTES])
    caller.session(data[handshake.CHALLENGE_BYTES :])


KNOWN = Caller(TOKEN, Purpose.RING).answer(handshake.MAGIC + bytes(handshake.NONCE))


def _framing() -> Framing:
    plan = RingPlan.cut(900, 4, 3, 8, 256)
    return Framing(Key(3, 4, 0, 1, "00" * 16), plan, operations(0, 3), 4, 0)


class _Frames:
    """Headers and entries as they come over one connection."""

    def __init__(self) -> None:
        self.framing = _framing()
        self.seeds = [
            self.framing.header(operation, round_, False) + Entry(1, (Contribution(1, 2, 3, 4, 0.5),)).pack()
            for operation in list(self.framing.operations)[:-1]
            for round_ in range(2)
        ]

    def __call__(self, data: bytes) -> None:
        course, size = FrameOrder(), wire_frame.HEADER.size
        frame = self.framing.check(data[:size].ljust(size, b"\0"))
        course.check(frame)
        assert frame.nbytes <= 900 * 4
        rest = data[size:]
        wire_frame.unpack_entries(rest[: len(rest) // wire_frame.ENTRY_BYTES * wire_frame.ENTRY_BYTES])


class _Bytes:
    """Stands for a loop and a socket from which `data` is received."""

    def __init__(self, data: bytes) -> None:
        self._file = io.BytesIO(data)

    async def sock_recv(self, sock: object, count: int) -> bytes:
        return self._file.read(min(count, 1000))


def _finish(coroutine: Any) -> Any:
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waits")


def _control(data: bytes) -> None:
    loop: Any = _Bytes(data)
    asyncio._set_running_loop(loop)
    try:
        while _finish(connections.receive(loop, protocol.RingBeat, CommitToken, protocol.RingAbort)) is not None:
            pass
    finally:
        asyncio._set_running_loop(None)


LOOP = asyncio.new_event_loop()
atexit.register(LOOP.close)


def _channel(data: bytes) -> None:
    """Frames between a leader and its ranks."""
    reader = asyncio.StreamReader(loop=LOOP)
    reader.feed_data(data)
    reader.feed_eof()
    while _finish(rank_channel.read(reader, *rank_channel.REPORTS)) is not None:
        pass


def _store(data: bytes) -> None:
    """Frames between the ranks of a replica and their store, and what it does with them; lines as frames, too."""
    table = KeyTable()
    for frames in (data, *(protocol.LENGTH.pack(len(line)) + line for line in data.split(b"\n"))):
        reader = asyncio.StreamReader(loop=LOOP)
        reader.feed_data(frames)
        reader.feed_eof()
        while isinstance(call := _finish(rank_channel.read(reader, protocol.StoreCall)), protocol.StoreCall):
            answer = LOOP.run_until_complete(table.answer(replace(call, wait_s=0.0)))
            if len(answer.error) > 300 or table.nbytes > 20 * len(data):
                raise AssertionError("more than was sent")
            protocol.decode(protocol.encode(answer), protocol.StoreAnswer)


def _manifest(data: bytes) -> None:
    """With a digest that fits, so that what is behind it is looked at; and without."""
    body = data[65:] if data[64:65] == b"\n" else data
    digest = blake3.blake3(body).hexdigest().encode()
    with contextlib.suppress(DataCorruption):
        shard_manifest.decode_header(data)
    shard_manifest.decode(digest + b"\n" + body)


def _held(data: bytes) -> None:
    held = shard_manifest.decode_held(data)
    assert shard_manifest.decode_held(shard_manifest.encode_held(held)) == held


def _agent(data: bytes) -> None:
    if len(data) >= protocol.LENGTH.size:
        protocol.frame_length(data[: protocol.LENGTH.size], messages.MAX_MESSAGE)
        messages.decode(data[protocol.LENGTH.size :], *messages.MESSAGES.values())


class _Sink:
    """What a handler says goes nowhere."""

    def fileno(self) -> int:
        raise OSError("no descriptor")


class _Handler(http._Handler):
    def setup(self) -> None:
        self.connection: Any = _Sink()
        self.rfile = io.BytesIO(self.request)
        self.wfile: Any = io.BytesIO()
        self.reader: Any = SimpleNamespace(now=lambda responding: None, taken=0)


SHELF = InMemorySnapshots()
SHELF.put(shard_manifest.ShardManifest(BASE, 0, 1, "0" * 32, 0, (), (), ()), SnapshotBuffer(0))


def _request(data: bytes) -> None:
    where: Any = SimpleNamespace(source=SHELF)
    _Handler(data, ("x", 1), where)  # type: ignore[arg-type]


def _answer(data: bytes) -> None:
    stream = io.BytesIO(data)
    sock: Any = SimpleNamespace(recv=stream.read)
    answer = DonorConnection("x:1", TOKEN)._head(sock)
    assert 0 <= answer.length < 10**18


class _Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.closed = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 9) if name in ("peername", "sockname") else default

    def write(self, data: Any) -> None: ...
    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


async def _app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


class _Lighthouse:
    """The lighthouse's door: heads and bodies."""

    def __init__(self) -> None:
        logging.getLogger("uvicorn").setLevel(logging.ERROR)
        self._config = Uvicorn(_app, log_config=None, lifespan="off")
        self._config.load()
        self._connections = lighthouse_door.Connections()

    def __call__(self, data: bytes) -> None:
        LOOP.run_until_complete(self._feed(data))

    async def _feed(self, data: bytes) -> None:
        door = lighthouse_door.GuardedConnection(
            self._connections, config=self._config, server_state=ServerState(), app_state={}, _loop=LOOP
        )
        door.connection_made(_Transport())
        for begin in range(0, len(data), 4096):
            if door.transport.is_closing():
                break
            door.data_received(data[begin : begin + 4096])
        await asyncio.sleep(0)
        door.connection_lost(None)


def _yaml(data: bytes) -> None:
    # PyYAML reads some 100 kB a second; the file is its reader's own, so length is no attack.
    document = loader._parse_yaml("config file", data[:4096], shown="x")
    if isinstance(document, dict):
        loader.parse(document)


class _Rows:
    """A log of rows that others append to."""

    def __init__(self) -> None:
        folder = tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        self._path = Path(folder) / "rows.jsonl"

    def __call__(self, data: bytes) -> None:
        self._path.write_bytes(data)
        tailer = Tailer(self._path)
        while tailer.poll(4096):
            pass


def _where(data: bytes) -> None:
    text = data.decode("latin-1")
    with contextlib.suppress(ValueError):
        host, port = address.split(text)
        assert address.split(address.join(host, port)) == (host, port)
    validation.check((text,), (text,), None, ())


POLICY = quorum.Policy(slots=4, steps=10)
SEVERAL = tuple(Contribution(1, 4, 1, 9 * n, 0.5, 4, n // 2) for n in range(4))
RECORD = CommitRecord(1, 0, 3, "0" * 32, (0, 1), 2, SEVERAL, "d", spoiled=((0, 1, 2),), retries=2, wanted=24)
PREPARED = protocol.QuorumRequest(Report(1, "1-x-0", BASE, 3, prepared=RECORD), (), (), "c", "l", "n")


def _report(data: bytes) -> None:
    """A replica's report, with a record of several runs: what is believed can be applied to a ledger."""
    said = protocol.decode(data, protocol.QuorumRequest)
    assert isinstance(said, protocol.QuorumRequest)
    validation.check_ask(quorum.LighthouseState.empty(POLICY, 1), said)
    record = said.report.prepared
    if record is not None and not record.doubled:
        record.ledger(Ledger.empty(4))


def _entry(data: bytes) -> None:
    """What a member says that it has trained: what is believed can be written and applied."""
    size = wire_frame.ENTRY_BYTES
    for entry in wire_frame.unpack_entries(data[: len(data) // size * size]):
        assert wire_frame.unpack_entries(entry.pack())[0].pack() == entry.pack()
        shards = max((c.shard for c in entry.contributions), default=0) + 1
        Ledger.empty(shards).advance(c.run for c in entry.contributions)


HEAD = b"GET /v1/state/1/2/" + b"0" * 32 + b"/0/manifest HTTP/1.1\r\nHost: x\r\n\r\n"
LIST = b"GET /v1/held HTTP/1.1\r\nHost: x\r\n\r\n"
RANGED = b"GET /v1/state/1/2/" + b"0" * 32 + b"/0/data HTTP/1.1\r\nRange: bytes=0-9\r\n\r\n"
POST = b"POST /v1/quorum HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
CHUNKED = b"POST /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
MANIFEST = shard_manifest.encode(
    shard_manifest.ShardManifest(
        BASE,
        0,
        1,
        "0" * 32,
        8,
        (shard_manifest.PackedTensor("a", "param", "float32", (2,), (2,), 0, 8),),
        (4,),
        ({"lr": 0.1},),
        (),
        ("0" * 16,),
    )
)
HELD = [shard_manifest.HeldShard(BASE, 0, rank, 2, "0" * 32, 8, True, "r0h0") for rank in range(2)]
ORDERS = [
    messages.Hello(0, 2, 100),
    messages.Stage(BASE),
    messages.Pin(BASE, 5.0),
    messages.Recall(),
    messages.Done(),
    messages.KeepCopy(shard_manifest.ExpectedShard(BASE, 1, 2, "0" * 32, 100), ("127.0.0.1:1",), 5.0, 1000),
    messages.OweCopies(((0, 1),), BASE),
    messages.FreeCopies((0, 1)),
    messages.AwaitCopies(BASE, 1.0),
    messages.KeptCopies(((0, 1),), (messages.CopyFailure(0, 0, "gone", BASE),)),
]
CALLS = [
    protocol.StoreCall(1, 1, "set", ("0-x-0/0//cpu//0/1",), packed([bytes(range(162))])),
    protocol.StoreCall(1, 2, "add", ("n",), (), 3),
    protocol.StoreCall(1, 3, "wait", ("0-x-0/0//cpu//0/1", "n"), (), 0, 60.0),
    protocol.StoreCall(1, 4, "compare_set", ("n",), packed([b"3", b"x"])),
    protocol.StoreCall(1, 5, "get", ("n",), (), 0, 60.0),
    protocol.StoreCall(1, 6, "delete", ("n",)),
]
YAML = [b"replicas: 2\ntrain: {steps: 5}\n", b"chaos: [{at_step: 3, replicas: [1], rank: 0, signal: KILL}]\n"]


def targets() -> dict[str, Callable[[], Parser]]:
    """The parsers by name; each is made when it is wanted."""
    violation = (ProtocolViolation,)
    return {
        "protocol": lambda: Parser(_message, _said(), violation),
        "handshake": lambda: Parser(_handshake, [KNOWN, handshake.MAGIC + bytes(64)], violation),
        "report": lambda: Parser(_report, [protocol.encode(PREPARED)], violation),
        "entry": lambda: Parser(_entry, [Entry(1, SEVERAL).pack(), Entry(2).pack()], violation),
        "frame": lambda: Parser(f := _Frames(), f.seeds, (ProtocolViolation, StaleEpoch, struct.error)),
        "control": lambda: Parser(_control, [protocol.frame(protocol.RingBeat(1, 2, 3))], violation),
        "channel": lambda: Parser(_channel, [protocol.frame(protocol.RankStopped(1, 2))], ()),
        "store": lambda: Parser(
            _store, [b"".join(map(protocol.frame, CALLS)), b"\n".join(map(protocol.encode, CALLS))], ()
        ),
        "manifest": lambda: Parser(_manifest, [MANIFEST], (DataCorruption,)),
        "held": lambda: Parser(_held, [shard_manifest.encode_held(HELD)], (DataCorruption,)),
        "agent": lambda: Parser(_agent, [messages.frame(each) for each in ORDERS], violation),
        "state_request": lambda: Parser(_request, [HEAD, RANGED, HEAD + RANGED, LIST], (OSError,)),
        "state_answer": lambda: Parser(
            _answer,
            [b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nETag: x\r\n\r\nabcde"],
            (DataCorruption, ConnectionError, DonorBusy),
        ),
        "lighthouse": lambda: Parser(_Lighthouse(), [HEAD, POST, CHUNKED], ()),
        "config": lambda: Parser(_yaml, YAML, (ConfigError,)),
        "rows": lambda: Parser(_Rows(), [b'{"event":"x","t":1.5}\n{"a":[1,2]}\nhalf'], ()),
        "address": lambda: Parser(_where, [b"10.0.0.1:80", b"[::1]:80"], violation),
    }


def verdicts(inputs: int) -> dict[str, list[str]]:
    """What the parsers say to `inputs` inputs each: the name of what they raise, or that they accept it."""
    found: dict[str, list[str]] = {}
    for name, make in sorted(targets().items()):
        parser = make()
        mutator = Mutator(parser.seeds, 11)
        said = found[name] = []
        for data in [*parser.seeds, *(mutator.next() for _ in range(inputs))]:
            try:
                parser.parse(data)
            except Exception as error:
                said.append(type(error).__name__)
            else:
                said.append("accepted")
    return found


if __name__ == "__main__":
    print(json.dumps(verdicts(int(sys.argv[1]))))

"""What a message may claim, where a replica may listen, and whether its sender trains the same model. Pure.

Every message is checked here before a decision sees it, so the decisions need not doubt a number or a name: a
report that could not be true must never become a state that is kept. Amounts are bounded, too: a message with a
valid token may still come from a broken or hostile process.

Addresses: other replicas connect to what a grant names, so an address is let in only where it is the sender's own,
or in a network that the operator allows (`network.allow`). Names are refused: what a name means can change between
this check and the connection.
"""

from __future__ import annotations

import functools
import ipaddress
import re
from collections.abc import Iterable, Mapping

from ft_hsdp.core.commit import MAX_ROWS, AttemptId, CommitRecord
from ft_hsdp.core.grant import Hosts, Refused, Report, ranks_of
from ft_hsdp.core.host_report import HostReport
from ft_hsdp.core.ledger import MAX_UNIT
from ft_hsdp.core.replica_state import ENTRY, PROTOCOL, difference, other_data
from ft_hsdp.core.restart import IncarnationId
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import EXIT_CONFIG, ProtocolViolation
from ft_hsdp.memory.hosts import Host
from ft_hsdp.protocol import MAX_COUNT, MAX_RULES, MAX_TEXT, ProcessReport, QuorumRequest
from lighthouse.quorum.rules import Incarnation
from lighthouse.quorum.state import Agreement, LighthouseState

MAX_ADDRESSES = 64  # of each kind
MAX_MACHINES = 2**12  # of one incarnation
METADATA = ipaddress.ip_address("fd00:ec2::254")  # of a cloud's host; its link-local ones are refused anyway
# What is reported may be above all that is known by this much. So one wrong value stays far below what is refused.
EPOCHS_AHEAD = 2**20
TERMS_AHEAD = 2**32
NUMBERS_AHEAD = 2**32  # of incarnations
# A lighthouse that has granted nothing yet may have lost its store: it believes larger ones.
EPOCH_FRESH, TERM_FRESH, NUMBER_FRESH = 2**40, 2**52, 2**52
STEPS_AHEAD = 2  # no step is further above the job's last one, or the head, than this
ATTEMPT_LIMIT = 2**20
_PUT_BACK = " file: put it back as it was when the job began, or start another job (job.name) with it"

_MACHINE = re.compile(r"[^\s/]{1,256}")
_LIFE = re.compile(r"[0-9a-f]{1,32}")
_LINEAGE = re.compile(r"[0-9a-f]{32}")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Networks = tuple[Network, ...]


def networks(allow: Iterable[str]) -> Networks:
    return tuple(ipaddress.ip_network(text) for text in allow)


@functools.lru_cache(256)
def check(ring: tuple[str, ...], state: tuple[str, ...], peer: str | None, allow: Networks) -> None:
    """Check that the sender at ``peer`` may listen at these addresses. Remembers what it let in.

    The same replica asks with the same addresses every step, hence the cache.

    Args:
        ring: "host:port" of each rank, for the ring.
        state: "host:port" of each rank, for fetches of its state.
        peer: The address that the request came from; None: this process, which may name any.
        allow: Networks in which it may listen besides its own address.

    Raises:
        ProtocolViolation: it may not; one line names the address and what is allowed.
    """
    for name, addresses in (("ring", ring), ("state", state)):
        if len(addresses) > MAX_ADDRESSES:
            raise ProtocolViolation(
                f"{name} has {len(addresses)} addresses; at most {MAX_ADDRESSES} times host:port"
            )
        for address in addresses:
            host = _host(name, address)
            if peer is not None:
                _allowed(name, address, host, _plain(ipaddress.ip_address(peer.partition("%")[0])), allow)


def _host(name: str, address: str) -> Address:
    """Return the host of "host:port"; an IPv6 address may stand in brackets."""
    host, _, port = address.rpartition(":")
    try:
        found = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        found = None
    if found is None or not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536):
        raise ProtocolViolation(
            f"{name}: {address[:60]!r} is not host:port with an IP address and a port from 1 to 65535"
        )
    return _plain(found)


def _plain(address: Address) -> Address:
    return getattr(address, "ipv4_mapped", None) or address


def _allowed(name: str, address: str, host: Address, peer: Address, allow: Networks) -> None:
    """Check one address: it can be reached by others, and is the sender's own or in an allowed network."""
    never = host.is_unspecified or host.is_multicast or host.is_link_local or host == METADATA
    if never or host == ipaddress.ip_address("255.255.255.255"):
        raise ProtocolViolation(
            f"{name}: no replica can be reached at {address}: give network.host an address of its own"
        )
    mine = host == peer or (host.is_loopback and peer.is_loopback)
    if not mine and not any(host in network for network in allow):
        raise ProtocolViolation(
            f"{name}: {address} is neither where its replica asks from ({peer}) nor in a network of network.allow"
        )


def other_rules(agreed: Agreement, rules: Mapping[str, str]) -> str:
    """Return which key of a configuration is not as the replicas have ``agreed``; "": none, or it is not known."""
    found = difference(rules, dict(agreed.rules)) if rules and agreed.rules else None
    if found is None:
        return ""
    key, theirs, mine = found
    line = f"{key} is {theirs} here, and {mine} in the job: all replicas need the same"
    return line + {PROTOCOL: " version of ft_hsdp", ENTRY: _PUT_BACK}.get(key, "")


def refusal(agreed: Agreement, ask: QuorumRequest) -> Refused | None:
    """Return why the sender of ``ask`` cannot be part of the job; None: it can.

    Args:
        agreed: What the replicas of the job have in common.
        ask: The request, with what its sender was configured with.

    Returns:
        The refusal; its line names the key that differs.
    """
    differs = agreed.config_hash is not None and agreed.config_hash != ask.config_hash
    if differs and (line := other_rules(agreed, ask.rules)):
        return Refused(line, EXIT_CONFIG)
    pairs = (
        ("config hash", agreed.config_hash, ask.config_hash),
        ("model layout", agreed.layout, ask.layout),
        ("numerics", agreed.numerics, ask.numerics),
        ("digest of the frozen weights and buffers", agreed.frozen, ask.frozen),
    )
    for what, wanted, got in pairs:
        if wanted is not None and wanted != got:
            line = f"{what} {got[:40]!r} is not the job's {wanted[:40]!r}: all replicas need the same"
            return Refused(line, EXIT_CONFIG)
    if ask.data and (other := other_data(ask.data, dict(agreed.data))) is not None:
        line = f"data: {other[0]} is {other[1]} on replica {ask.report.replica}, and {other[2]} in the job"
        return Refused(f"{line}: all replicas need the same data", EXIT_CONFIG)
    return None


def with_first(agreed: Agreement, ask: QuorumRequest) -> Agreement:
    """Return ``agreed`` with the fields that are still None taken from ``ask``."""
    whole = agreed.config_hash and agreed.layout and agreed.numerics is not None and agreed.frozen is not None
    if whole and not ask.data:
        return agreed
    numerics = ask.numerics if agreed.numerics is None else agreed.numerics
    rules = agreed.rules if agreed.config_hash else tuple(sorted(ask.rules.items()))
    frozen = ask.frozen if agreed.frozen is None else agreed.frozen
    config_hash, layout = agreed.config_hash or ask.config_hash, agreed.layout or ask.layout
    data = tuple({**ask.data, **dict(agreed.data)}.items())[:MAX_RULES]
    return Agreement(config_hash, layout, numerics, rules, frozen, data)


def incarnation(text: str) -> Incarnation:
    """Parse the name of an incarnation: ``0-abcd-1`` is (0, "0-abcd-1").

    Raises:
        ProtocolViolation: it does not start with a replica's id, or is too long.
    """
    name = IncarnationId.parse(text)
    if name is None:
        raise ProtocolViolation(f"incarnation {text[:40]!r} is not REPLICA-RUN-RESTARTS")
    return name.replica, text


def check_ask(s: LighthouseState, ask: QuorumRequest, peer: str | None = None, allow: Networks = ()) -> None:
    """Check that a report can be true, and that its replica may listen where it says.

    Args:
        peer: The address that it came from, as in `check`.
        allow: Networks in which the replica may listen besides that address.

    Raises:
        ProtocolViolation: it cannot; one line names the field.
    """
    r = ask.report
    replicas = s.policy.slots - 1
    steps = max(s.policy.steps, s.head.step if s.head else 0) + STEPS_AHEAD
    epochs = max(s.epoch, EPOCH_FRESH * (s.grant is None)) + EPOCHS_AHEAD
    _within("replica", r.replica, replicas)
    _state("state", r.state, epochs, steps)
    _within("step", r.step, steps)
    _within("epoch", r.epoch, epochs)
    _within("after", r.after, epochs)
    _within("max_term", r.max_term, max(s.term, TERM_FRESH * (s.grant is None)) + TERMS_AHEAD)
    _within("saved", r.saved, steps)
    if not 0 <= r.number <= s.admissions:
        _within("number", r.number, _numbers(s))
    _named("incarnation", r.incarnation, r.replica)
    if r.equal or r.leaving or r.lagging or r.diverged or r.suspects:
        _sets(r, replicas)
    if r.edge is not None:
        _ids("edge", r.edge, replicas)
    if r.void is not None:
        _fence("void", r.void, epochs, steps)
    if r.doubt is not None:
        _state("doubt", r.doubt, epochs, steps)
    if r.prepared is not None:
        _record("prepared", r.prepared, epochs, steps, replicas, s.policy.units.shared)
    if r.committed is not None:
        _record("committed", r.committed, epochs, steps, replicas, s.policy.units.shared)
    for name, told in (("rules", ask.rules), ("data", ask.data)):
        if not all((key + value).isprintable() for key, value in told.items()):
            raise ProtocolViolation(f"{name}: a key or a value is not printable")
    check(ask.ring, ask.state, peer, allow)
    if ask.hosts:
        _hosts(ask.hosts, len(ask.ring))


def _numbers(s: LighthouseState) -> int:
    """Return the largest number of an incarnation or a lease that a report may name."""
    known = max(s.admissions, *(life.number for life in s.lives), 0)
    return max(known, NUMBER_FRESH * (s.grant is None)) + NUMBERS_AHEAD


def check_processes(
    s: LighthouseState, processes: ProcessReport
) -> tuple[dict[int, str | None], frozenset[Incarnation]]:
    """Check that a rank's report, or that of a machine, can be true.

    Returns:
        The incarnation that has begun, by replica, and the one before it, which has exited.

    Raises:
        ProtocolViolation: it cannot be true; one line names the field.
    """
    begun, said = processes.begun, processes.machine
    replicas = {incarnation(name)[0] for name in (begun, said.incarnation if said is not None else "") if name}
    for replica in replicas:
        _within("replica", replica, s.policy.slots - 1)
    if said is not None:
        _within("machines", said.machines - 1, MAX_MACHINES - 1)
        if not _MACHINE.fullmatch(said.machine):
            raise ProtocolViolation("machine: a host's name has 1 to 256 characters, without spaces and slashes")
    if not begun:
        return {}, frozenset()
    me = IncarnationId.parse(begun)
    assert me is not None
    before = {(me.replica, str(me.previous))} if me.previous is not None else set()
    return {me.replica: begun}, frozenset(before)


def check_host(s: LighthouseState, report: HostReport, peer: str | None, allow: Networks) -> None:
    """Check that the report of a host's agent can be true.

    Args:
        peer: The address that it came from, as in `check`.
        allow: Networks in which ranks may listen besides that address.

    Raises:
        ProtocolViolation: it cannot; one line names the field.
    """
    try:
        Host.parse(report.path)
    except ValueError as error:
        raise ProtocolViolation(f"host: {error}") from None
    if not _LIFE.fullmatch(report.life) or max(len(report.space), len(report.seen)) > MAX_TEXT:
        raise ProtocolViolation("host: its agent has a life of up to 32 hexadecimal digits, and short marks")
    _within("number", report.number, MAX_COUNT)
    if report.replica is not None:
        _within("replica", report.replica, s.policy.slots - 1)
    for number, most in zip(report.home or (), (s.policy.slots - 1, MAX_COUNT), strict=False):
        _within("home", number, most)
    _ids("only", report.only, s.policy.slots - 1)
    check((report.address,), (), peer, allow)
    for each in report.ranks:
        replica, _ = incarnation(each.incarnation)
        _within("replica", replica, s.policy.slots - 1)
        for rank in (*each.living, *(ended.rank for ended in each.ended)):
            _within("rank", rank, MAX_COUNT)
        for pid in each.pids:
            _within("pid", pid, MAX_COUNT)
        for number in each.fed or ():
            _within("fed", number, MAX_UNIT)
        lines = [each.failed, each.how, *(line for ended in each.ended for line in (ended.why, ended.cause))]
        if any(len(line) > 4 * MAX_TEXT or not line.isprintable() for line in lines):
            raise ProtocolViolation("host: a reason is one line of 1,024 characters at most")
        if not all(-64 <= ended.code <= 255 for ended in each.ended):
            raise ProtocolViolation("host: an exit code is -64 to 255")


@functools.lru_cache(256)
def _hosts(hosts: Hosts, ranks: int) -> None:
    """Check the hosts of a replica with so many ranks. Remembers what it let in, as `check` does."""
    parts = [each for _, of_host in hosts for each in (((0, of_host),) if isinstance(of_host, int) else of_host)]
    fits = len(parts) <= ranks and all(0 < count <= ranks for _, count in parts)
    if not fits or sum(count for _, count in parts) != ranks:
        raise ProtocolViolation(
            f"hosts has {len(hosts)} hosts with other than {ranks} ranks, one for each address"
        )
    if {rank for _, of_host in ranks_of(hosts) for rank in of_host} != set(range(ranks)):
        raise ProtocolViolation(f"hosts names a rank twice, or one that is not below {ranks}")
    for path, _ in hosts:
        try:
            Host.parse(path)
        except ValueError as error:
            raise ProtocolViolation(f"hosts: {error}") from None


def _sets(r: Report, replicas: int) -> None:
    for name in ("equal", "leaving", "lagging", "diverged", "suspects"):
        _ids(name, getattr(r, name), replicas)


def _ids(name: str, ids: tuple[int, ...], replicas: int) -> None:
    if len(ids) > replicas + 1 or len(set(ids)) != len(ids):
        raise ProtocolViolation(f"{name} names {len(ids)} replicas; possible: each of {replicas + 1} once")
    if ids:
        _within(name, min(ids), replicas)
        _within(name, max(ids), replicas)


def _state(name: str, state: StateId, epochs: int, steps: int) -> None:
    _within(f"{name}.step", state.step, steps)
    _within(f"{name}.commit_epoch", state.commit_epoch, epochs if state.step else 0)
    _hash(f"{name}.lineage", state.lineage)


def _fence(name: str, fence: AttemptId | CommitRecord, epochs: int, steps: int) -> None:
    _within(f"{name}.epoch", fence.epoch, epochs)
    _within(f"{name}.step", fence.step, steps)
    _within(f"{name}.attempt", fence.attempt, ATTEMPT_LIMIT)


def _record(name: str, record: CommitRecord, epochs: int, steps: int, replicas: int, shared: bool) -> None:
    """Check that a commit record can be one of this job; the work is bounded by the number of replicas."""
    _fence(name, record, epochs, steps)
    _hash(f"{name}.prev", record.prev)
    _ids(f"{name}.ring", record.ring, replicas)
    _within(f"{name}.total", record.total, replicas + 1)
    for ids in ("poisoned", "outliers"):
        _ids(f"{name}.{ids}", getattr(record, ids), replicas)
    _within(f"{name}.contributions", len(record.contributions), (replicas + 1) * MAX_ROWS)
    if wrong := record.impossible(shared):
        raise ProtocolViolation(f"{name}.contributions: {wrong}")
    _within(f"{name}.spoiled", len(record.spoiled), (replicas + 1) * MAX_ROWS)
    for shard, first, count in record.spoiled:
        _within(f"{name}.spoiled", shard, replicas)
        _within(f"{name}.spoiled", first, MAX_UNIT)
        _within(f"{name}.spoiled", count, MAX_UNIT - first)
    for field in ("retries", "wanted", "chunk_bytes"):
        _within(f"{name}.{field}", getattr(record, field), MAX_COUNT)
    if len(record.digest) > MAX_TEXT:
        raise ProtocolViolation(f"{name}.digest has {len(record.digest)} characters; at most {MAX_TEXT}")


def _within(name: str, value: int, largest: int) -> None:
    """Check that a number is from 0 to ``largest``."""
    if not 0 <= value <= largest:
        shown = str(value) if abs(value) < 10**24 else "a very large number"
        raise ProtocolViolation(f"{name} is {shown}; possible: 0 to {largest}")


def _hash(name: str, text: str) -> None:
    if not _LINEAGE.fullmatch(text):
        raise ProtocolViolation(f"{name} {text[:40]!r} is not 32 hex digits")


def _named(field: str, text: str, replica: int) -> None:
    if incarnation(text)[0] != replica:
        raise ProtocolViolation(f"{field}: {text[:40]!r} is not an incarnation of replica {replica}")

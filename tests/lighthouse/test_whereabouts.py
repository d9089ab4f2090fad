"""Where a replica may say that it listens: at home, or where the operator allows it; nowhere else."""

from __future__ import annotations

import pytest

from ft_hsdp.errors import ProtocolViolation
from lighthouse import validation

ALLOW = validation.networks(["10.0.0.0/8", "fd00::/8"])

GOOD = [
    ("127.0.0.1", "127.0.0.1:7000"),
    ("127.0.0.1", "127.0.1.1:7000"),
    ("::1", "127.0.0.1:65535"),
    ("::1", "[::1]:1"),
    ("::1", "::1:7000"),
    ("192.0.2.7", "192.0.2.7:80"),
    ("::ffff:192.0.2.7", "192.0.2.7:80"),
    ("192.0.2.7", "[::ffff:192.0.2.7]:80"),
    ("2001:db8::1", "[2001:db8:0:0::1]:80"),
    ("fe80::1%eth0", "10.1.2.3:80"),
    ("192.0.2.7", "10.255.0.1:7000"),
    ("192.0.2.7", "[fd00::5]:7000"),
    (None, "8.8.8.8:53"),
]
ELSEWHERE = "neither where its replica asks from"
NOWHERE = "no replica can be reached"
FORM = "is not host:port"
BAD = [
    ("192.0.2.7", "192.0.2.8:80", ELSEWHERE),
    ("192.0.2.7", "127.0.0.1:22", ELSEWHERE),
    ("192.0.2.7", "[::1]:22", ELSEWHERE),
    ("127.0.0.1", "192.0.2.7:80", ELSEWHERE),
    ("192.0.2.7", "[2001:db8::1]:80", ELSEWHERE),
    ("127.0.0.1", "169.254.169.254:80", NOWHERE),
    ("169.254.169.254", "169.254.169.254:80", NOWHERE),
    ("::1", "[::ffff:169.254.169.254]:80", NOWHERE),
    ("::1", "[fe80::1]:80", NOWHERE),
    ("10.0.0.1", "[fd00:ec2::254]:80", NOWHERE),
    ("127.0.0.1", "0.0.0.0:80", NOWHERE),
    ("127.0.0.1", "[::]:80", NOWHERE),
    ("127.0.0.1", "224.0.0.1:80", NOWHERE),
    ("127.0.0.1", "[ff02::1]:80", NOWHERE),
    ("127.0.0.1", "255.255.255.255:80", NOWHERE),
    ("127.0.0.1", "localhost:80", FORM),
    ("127.0.0.1", "node-7.example.com:80", FORM),
    ("127.0.0.1", "2130706433:80", FORM),
    ("127.0.0.1", "0x7f.1:80", FORM),
    ("127.0.0.1", "127.0.0.1", FORM),
    ("127.0.0.1", "127.0.0.1:0", FORM),
    ("127.0.0.1", "127.0.0.1:65536", FORM),
    ("127.0.0.1", "127.0.0.1:-1", FORM),
    ("127.0.0.1", "127.0.0.1:\u0661", FORM),
    ("127.0.0.1", "127.0.0.1:80/path", FORM),
    ("127.0.0.1", "user@127.0.0.1:80", FORM),
    ("127.0.0.1", "", FORM),
    ("127.0.0.1", "x" * 10**5, FORM),
]


@pytest.mark.parametrize(("peer", "address"), GOOD)
@pytest.mark.parametrize("ring", [True, False])
def test_at_home_and_where_the_operator_allows(peer, address, ring):
    validation.check((address,) if ring else (), () if ring else (address,), peer, ALLOW)


@pytest.mark.parametrize(("peer", "address", "why"), BAD, ids=lambda v: str(v)[:40])
@pytest.mark.parametrize("ring", [True, False])
def test_nowhere_else(peer, address, why, ring):
    with pytest.raises(ProtocolViolation, match=why) as caught:
        validation.check((address,) if ring else (), () if ring else (address,), peer, ALLOW)
    line = str(caught.value)
    assert line.startswith("ring" if ring else "state")
    assert len(line) < 300
    assert "\n" not in line


def test_a_refusal_is_not_remembered_as_a_yes_nor_one_peers_yes_as_anothers():
    for _ in range(2):
        with pytest.raises(ProtocolViolation):
            validation.check(("192.0.2.8:80",), (), "192.0.2.7", ())
    validation.check(("192.0.2.8:80",), (), "192.0.2.8", ())
    with pytest.raises(ProtocolViolation):
        validation.check(("192.0.2.8:80",), (), "192.0.2.7", ())


def test_a_replica_has_at_most_64_addresses():
    validation.check(("127.0.0.1:1",) * 64, (), "127.0.0.1", ())
    with pytest.raises(ProtocolViolation, match="ring has 65 addresses"):
        validation.check(("127.0.0.1:1",) * 65, (), "127.0.0.1", ())

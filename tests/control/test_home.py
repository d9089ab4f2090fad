"""Where a machine says that it is: always an address, never one at which nobody can be reached."""

from __future__ import annotations

import pytest

from ft_hsdp.control.lighthouse_client import own_address
from ft_hsdp.errors import ConfigError

URL = "http://127.0.0.1:8765"


@pytest.mark.parametrize(
    ("host", "lighthouse", "address"),
    [
        ("127.0.0.1", URL, "127.0.0.1"),
        ("192.0.2.7", URL, "192.0.2.7"),
        ("::1", URL, "::1"),
        ("localhost", URL, "127.0.0.1"),
        ("0.0.0.0", URL, "127.0.0.1"),
        ("0.0.0.0", "https://localhost", "127.0.0.1"),
        ("::", URL, "127.0.0.1"),
    ],
)
def test_it_is_an_address_that_can_be_reached(host, lighthouse, address):
    assert own_address(host, lighthouse) in (address, "::1" if "localhost" in host + lighthouse else address)


@pytest.mark.parametrize(
    ("host", "lighthouse"), [("no-such-host.invalid", URL), ("0.0.0.0", "http://no-such.invalid:1")]
)
def test_a_name_without_an_address_is_one_line(host, lighthouse):
    with pytest.raises(
        ConfigError, match=r"^network\.host: got .*; allowed: an address of this machine \("
    ) as caught:
        own_address(host, lighthouse)
    assert "\n" not in str(caught.value)

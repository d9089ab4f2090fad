"""Shared by the tests of a backend whose slots only pretend."""

import pytest


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost spares are made again soon, and no cluster is asked where this machine is."""
    monkeypatch.setattr("ft_hsdp.launch.backend.spares.PAUSE_S", 0.01)
    monkeypatch.setattr("ft_hsdp.launch.ray.backend.ray.util.get_node_ip_address", lambda: "127.0.0.1")

from collections.abc import Iterator

import pytest

from tests.support.etcd_server import EtcdServer


@pytest.fixture(scope="session")
def etcd_session() -> Iterator[EtcdServer]:
    with EtcdServer() as server:
        yield server


@pytest.fixture
def etcd(etcd_session: EtcdServer) -> EtcdServer:
    """An etcd that serves; a test may kill, stop and wipe it."""
    if not etcd_session.serves():
        etcd_session.kill()
        etcd_session.start()
    return etcd_session

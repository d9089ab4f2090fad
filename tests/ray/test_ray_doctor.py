"""The doctor beside a real cluster: it looks, and leaves nothing there."""

import json
from typing import Any

import pytest

from tests.support.launch.ray_cluster import Cluster
from tests.support.started_job import launcher

pytestmark = [pytest.mark.multiproc, pytest.mark.soak]


def examined(cluster: Cluster, *words: str, **env: str | None) -> dict[str, Any]:
    given = {name: value for name, value in {**cluster.env, **env}.items() if value is not None}
    done = launcher("doctor", "configs/quickstart.yaml", "--json", *words, env=given)
    assert done.returncode in (0, 64), done.stderr
    (said,) = [check for check in json.loads(done.stdout)["checks"] if check["name"] == "ray"]
    assert isinstance(said, dict)
    return said


def test_a_cluster_is_looked_at_and_left_alone() -> None:
    with Cluster() as cluster:
        at = ("--ray-address", cluster.address)
        too_small = examined(cluster, *at)
        assert too_small["state"] == "fail"
        assert "room for 0" in too_small["text"]
        cluster.add(4)
        before = len(cluster.processes())
        well = examined(cluster, *at)
        assert well["state"] == "ok", well
        assert "room for 2" in well["text"]
        for stranger in ({"RAY_AUTH_TOKEN": "ab" * 32}, {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": None}):
            refused = examined(cluster, *at, **stranger)
            assert refused["state"] == "fail"
            assert "AuthenticationError" in refused["text"]
        assert len(cluster.processes()) == before
        assert cluster.ask()["actors"] == []

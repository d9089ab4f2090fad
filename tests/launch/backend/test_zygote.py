from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from ft_hsdp.launch.backend import zygote
from tests.support.descriptors import raised


@pytest.mark.parametrize("told", [True, False])
def test_a_rank_with_many_open_files_looks_whether_it_was_called(
    told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs: list[Path] = []
    monkeypatch.setattr(zygote, "_redirect", logs.append)
    monkeypatch.setattr(os, "environ", {})
    ours, theirs = socket.socketpair()
    with ours, theirs, raised(ours) as high:
        line = zygote.CallLine(high)
        if told:
            call = {"replica": 1, "run_id": "a", "restarts": 2, "log": str(tmp_path / "log")}
            theirs.sendall(json.dumps(call).encode() + b"\n")
        found = line.poll()
    assert (found is not None) == told
    assert logs == ([tmp_path / "log"] if told else [])
    assert found is None or (found.replica, found.restarts) == (1, 2)


def test_a_rank_whose_supervisor_is_gone_ends() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours, pytest.raises(SystemExit) as ended:
        zygote.CallLine(ours).poll()
    assert ended.value.code == 75

from __future__ import annotations

import json

import pytest

from ft_hsdp.launch.cli import main


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

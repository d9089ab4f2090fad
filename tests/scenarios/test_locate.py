"""`locate` says of a real run what its checkpoint and the pids of its ranks say."""

import json
from pathlib import Path
from typing import Any

import pytest

from ft_hsdp.launch.cli import main
from ft_hsdp.state.checkpoint import catalog
from tests.support.scenarios.scenario_job import Job


def test_the_rank_that_wrote_an_element_into_a_checkpoint_held_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def located(*words: object) -> Any:
        assert main(["locate", str(job.run), "--parameter", *map(str, words), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    kill = {"at_step": 3, "replicas": [1], "rank": 1}
    with Job(tmp_path, 8, replicas=2, chaos=[kill], checkpoint__every=8) as job:
        job.ends_well(8)
        lives = {e["incarnation"]: e["pids"] for e in job.events("ReplicaStarted")}
        assert len(lives) == 3
        (path,) = catalog.published(job.run / "checkpoints")
        manifest = catalog.verify(path, None).manifest
        for piece in manifest.pieces:
            tensor = manifest.tensors[piece.tensor]
            if tensor.kind == "param":
                last = [offset + size - 1 for offset, size in zip(piece.offsets, piece.sizes, strict=True)]
                found = located(tensor.name, "--index", ",".join(map(str, last)))
                assert found["shape"] == list(tensor.shape)
                assert [span["first"] for span in found["spans"][1:]] == [
                    s["last"] + 1 for s in found["spans"][:-1]
                ]
                for holder in (holder for span in found["spans"] for holder in span["holders"]):
                    assert piece.file.startswith(f"__{holder['rank']}_")
                    assert holder["host"] == f"r{holder['replica']}h0"
                    assert lives[holder["incarnation"]][holder["rank"]] == holder["pid"]
                assert found["spans"][-1]["last"] == 8
        for words in (["embed"], ["embed.weight", "--index", "5,64"], ["embed.weight", "--step", "9"]):
            assert main(["locate", str(job.run), "--parameter", *words]) == 64
            out, err = capsys.readouterr()
            assert (out, len(err.splitlines())) == ("", 1)
        assert "embed.weight" in located("embed.weight")["parameter"]

from typing import Any

import pytest

from tests.support.state.parallel_ranks import KINDS
from tests.support.state.started_ranks import rows_by_kind

RANKS = 4
DEADLINE_S = 150.0


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return rows_by_kind("parallel_ranks", RANKS, tmp_path_factory.mktemp("parallel"), DEADLINE_S)


@pytest.mark.parametrize("kind", KINDS)
def test_loss_gradient_norm_and_weights_are_those_of_the_model_in_one_process(found, kind) -> None:
    ranks = found.get(kind, [])
    assert len(ranks) == RANKS, "a kind before it failed"
    for row in ranks:
        assert "error" not in row, row["error"]
        assert max(row[what] for what in ("loss", "gradient", "norm", "clip", "weights", "saved")) <= 1e-6, row
    assert len({row["digest"] for row in ranks}) == 1, "of the whole state"
    assert len({row["weights_digest"] for row in ranks}) == RANKS, "each rank has a shard of its own"


@pytest.mark.parametrize("kind", [kind for kind, each in KINDS.items() if each.ranks_per_unit > 1])
def test_ranks_that_train_together_hold_alike_what_both_hold(found, kind) -> None:
    replicated = [row["replicated"] for row in found[kind]]
    assert replicated[0] == replicated[1] != ""
    assert replicated[2] == replicated[3] != replicated[0]


def test_a_mesh_that_does_not_fit_is_refused_in_one_line(found: dict[str, list[dict[str, Any]]]) -> None:
    refused = {row["kind"]: row["refused"] for rows in found.values() for row in rows[:1] if "refused" in row}
    wanted = {
        "tensor parallel, ranks_per_unit: 1": "ranks_per_unit: 2 if ranks train one micro-batch together",
        "tensor parallel, plain norms, ranks_per_unit: 1": "ranks_per_unit: 2 if ranks train one micro-batch",
        "tensor parallel, frozen norms, ranks_per_unit: 1": "sharded over all 4, or ranks_per_unit: 2 if",
        "tensor parallel outside": 'fully_shard(mesh=mesh["dp"]) of init_device_mesh(device, (2, 2), mesh_dim',
        "expert parallel, ranks_per_unit: 2": 'fully_shard(mesh=mesh["dp"]) of init_device_mesh(device, (2, 2)',
        "experts that differ by rank": "a mesh over the 4 ranks of this replica",
    }
    assert refused.keys() == wanted.keys()
    for kind, message in refused.items():
        assert message.startswith("job.adopt: got ")
        assert wanted[kind] in message, message
        assert "\n" not in message

"""Each optimizer of torch, over a rejoin, gives the bits of plain FSDP2 that is fed the same reduced gradients."""

import pytest

from tests.support.state.exact_ranks import CASES, CLIPPED, EXACT, RANKS, ROWS
from tests.support.state.started_ranks import rows_of_ranks

DEADLINE_S = 170.0
TORCH_CANNOT = ("LBFGS", "SparseAdam", "Adafactor", "Rprop")  # with the dense DTensors of FSDP2
TORCH_CANNOT_WITH = ("capturable", "differentiable", "Adagrad fused", "SGD fused")  # on a CPU or on DTensors
WE_CANNOT = ("SGD dampening",)


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each of two ranks says of each case."""
    rows = rows_of_ranks("exact_ranks", RANKS, tmp_path_factory.mktemp("exact"), DEADLINE_S)
    return [rank[-1] for rank in rows]


@pytest.mark.parametrize("case", CASES)
def test_it_is_exact_or_refused(verdicts: list[dict[str, str]], case: str) -> None:
    said = {each[case] for each in verdicts}
    assert len(said) == 1, "the ranks disagree"
    if case.startswith(TORCH_CANNOT) or case.endswith(TORCH_CANNOT_WITH):
        assert said.pop().startswith(f"refused as by torch: job.optimizer: got '{case.split()[0]}'")
    elif case in WE_CANNOT:
        assert said.pop().startswith(f"refused: job.optimizer: got '{case.split()[0]}'")
    else:
        assert said == {"equal"}


def test_a_group_is_clipped_by_its_norm_over_all_ranks(verdicts: list[dict[str, str]]) -> None:
    assert [each[CLIPPED] for each in verdicts] == ["clipped"] * RANKS


def test_an_optimizer_that_computes_with_several_rows_is_found(verdicts: list[dict[str, str]]) -> None:
    """Replicas of unequal width would have other bits after its update."""
    alone = sorted(name for name in EXACT if name != "Muon")
    assert [each[ROWS].split() for each in verdicts] == [alone] * RANKS


def test_every_optimizer_of_torch_is_tried() -> None:
    found = {name.split()[0] for name in CASES}
    assert {"Adam", "AdamW", "SGD", "Muon", "NAdam", "ASGD", "Adagrad", "RMSprop"} <= found
    assert len(CASES) > 100

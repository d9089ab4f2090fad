"""What the kernels become on sm_90, and that the check sees what it is there to see."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (pip install triton)")

from benchmarks.kernels import compile_check
from benchmarks.kernels.stepped import kernel
from ftar_kernels import handshake


@pytest.fixture(scope="module")
def rows():
    return compile_check.figures()


def test_the_kernels_keep_within_their_limits(rows):
    assert [text for row in rows for text in row.problems()] == []
    assert {row.dtype for row in rows} == {"fp32", "bf16", "fp16"}


def test_a_storing_reduction_loads_twice_and_stores_twice(rows):
    for row in rows:
        if row.name == "kernel reduces two":
            assert row.wide_loads == row.wide_stores


def test_a_kernel_that_does_not_know_where_a_block_begins_is_found():
    row = compile_check.compile_kernel(kernel, torch.float32, 1, REDUCES=True, TWO=True, VECTOR=1)
    assert [text.partition(": ")[2] for text in row.problems()] == [
        "0 loads of 16 bytes beside 34 narrow ones",
        "0 stores of 16 bytes beside 34 narrow ones",
    ]


def test_a_summary_reads_16_bytes_at_a_time(monkeypatch):
    assert compile_check.summary_problems() == []
    monkeypatch.setattr(compile_check.summary, "PART", 128)
    monkeypatch.setitem(compile_check.summary.SIZES, "PART", 128)
    assert compile_check.summary_problems() == [
        "block_kernel digest square no wide load",
        "block_kernel digest no wide load",
    ]


def test_a_launch_has_one_variant_of_each_type():
    assert compile_check.launch_problems() == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"registers": 65}, "65 registers"),
        ({"stack": 8}, "8 bytes of stack"),
        ({"local": 2}, "local memory"),
        ({"wide_loads": 0, "async_loads": 0}, "0 loads of 16 bytes beside 6 narrow ones"),
        ({"wide_stores": 0}, "0 stores of 16 bytes beside 6 narrow ones"),
        ({"edge_loads": 18, "wide_loads": 20}, "beside 18 narrow ones"),  # 4 loads of 24 are of 4 bytes each
        ({"edge_stores": 22, "wide_stores": 20}, "beside 22 narrow ones"),
        ({"acquires": 2}, "2 acquires"),
        ({"invalidates": 0}, "optimized away"),
        ({"releases": 0}, "no release"),
        ({"fences": 0}, "no release"),
        ({"votes": 0}, "not shared in its barrier"),
    ],
)
def test_each_limit_is_checked(rows, change, problem):
    row = next(row for row in rows if row.name == "persistent_kernel")
    (text,) = dataclasses.replace(row, **change).problems()
    assert problem in text


def test_interpreted_kernels_cannot_be_compiled(monkeypatch):
    monkeypatch.setattr(handshake, "INTERPRETED", True)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"):
        compile_check.figures()

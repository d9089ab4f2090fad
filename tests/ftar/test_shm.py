import fcntl
import gc
import mmap
import os

import pytest
import torch

from ft_hsdp.ftar.transport.arena import ALIGN, SEALS, SEGMENT, Arena, MappedSegments


def segments() -> int:
    """Descriptors of segments in this process."""
    gc.collect()
    names = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:  # the one that lists them
            continue
    return sum("memfd:ftar" in name for name in names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_registered_tensor_is_found_with_its_place(dtype: torch.dtype) -> None:
    arena = Arena()
    a, b = arena.empty((3, 5), dtype), arena.empty(7, dtype)
    assert (a.shape, a.dtype, b.shape) == ((3, 5), dtype, (7,))
    found_a, found_b = arena.find(a), arena.find(b)
    assert found_a is not None
    assert found_b is not None
    assert found_a[0] is found_b[0], "two small tensors share a segment"
    assert found_b[1] - found_a[1] == ALIGN
    tail = arena.find(b[3:])
    assert tail == (found_b[0], found_b[1] + 3 * dtype.itemsize)


def test_what_is_not_registered_is_not_found() -> None:
    arena = Arena()
    assert arena.find(torch.ones(4)) is None
    mine = arena.empty(4)
    others = [torch.ones(1000) for _ in range(50)]
    assert all(arena.find(x) is None for x in others)
    assert Arena().find(mine) is None
    assert arena.empty(0).numel() == 0


def test_a_neighbour_sees_the_same_memory() -> None:
    arena, mapped = Arena(), MappedSegments()
    x = arena.empty(1000).copy_(torch.arange(1000.0))
    found = arena.find(x[10:])
    assert found is not None
    segment, offset = found
    assert fcntl.fcntl(segment.fd, fcntl.F_GET_SEALS) & SEALS == SEALS
    mapped.add(segment.number, os.dup(segment.fd))
    seen = mapped.view(segment.number, offset, 4 * 990, torch.float32)
    assert torch.equal(seen, torch.arange(10.0, 1000.0))
    x.fill_(7)
    assert torch.equal(seen, torch.full((990,), 7.0))


@pytest.mark.parametrize(
    ("number", "offset", "nbytes"), [(2, 0, 8), (1, SEGMENT - 4, 8), (1, 2, 8), (1, SEGMENT, 4), (1, 2**63, 4)]
)
def test_what_is_not_in_a_segment_is_refused(number: int, offset: int, nbytes: int) -> None:
    arena, mapped = Arena(), MappedSegments()
    found = arena.find(arena.empty(4))
    assert found is not None
    mapped.add(1, os.dup(found[0].fd))
    with pytest.raises(ValueError, match=f"no {nbytes} bytes at {offset} of segment {number}"):
        mapped.view(number, offset, nbytes, torch.float32)


def test_a_segment_goes_with_its_last_tensor() -> None:
    before, arena = segments(), Arena()
    small = arena.empty(4)
    large = arena.empty(SEGMENT // 4)
    assert segments() == before + 4, "a segment has a descriptor, and its mapping another"
    assert arena.numbers == {1, 2}
    view = large[5:9]
    del large
    assert arena.numbers == {1, 2}, "a view holds it"
    del view
    arena.close()
    assert segments() == before + 2
    assert arena.numbers == {1}
    del small
    assert segments() == before
    assert arena.numbers == set()


def test_an_arena_that_nobody_has_any_more_lets_go_of_its_memory() -> None:
    before, arena = segments(), Arena()
    x = arena.empty(4)
    del arena
    assert segments() == before + 2
    x.fill_(1)
    del x
    assert segments() == before


def test_a_segment_that_is_forgotten_is_unmapped() -> None:
    before, arena, mapped = segments(), Arena(), MappedSegments()
    found = arena.find(arena.empty(4))
    assert found is not None
    mapped.add(found[0].number, os.dup(found[0].fd))
    seen = mapped.view(found[0].number, 0, 4, torch.float32)
    mapped.forget(found[0].number)
    mapped.forget(77)
    assert len(mapped) == 0
    seen.fill_(1)  # whoever still has it may still use it
    del found, seen
    arena.close()
    assert segments() == before


def test_no_memory_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    before = segments()

    def fails(*_: object) -> mmap.mmap:
        raise OSError("none left")

    monkeypatch.setattr(mmap, "mmap", fails)
    with pytest.raises(OSError, match="none left"):
        Arena().empty(4)
    assert segments() == before

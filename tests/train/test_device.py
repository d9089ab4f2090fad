import contextlib
import os
import sys
from collections import UserDict
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

import ft_hsdp
from ft_hsdp.config import Config
from ft_hsdp.core.randomness import stream
from ft_hsdp.errors import LocalSystemError
from ft_hsdp.ftar.settings import Settings
from ft_hsdp.ftar.transport.arena import Arena, pin
from ft_hsdp.train import device
from ft_hsdp.train.data import prefetch
from ft_hsdp.train.device import device_plane
from ft_hsdp.train.runtime import RankRuntime
from tests.support.refused import refused

CPU, META = torch.device("cpu"), torch.device("meta")  # meta stands for a device that tensors are moved to


class Encoding(UserDict[str, Any]):
    """A mapping with more attributes, as BatchEncoding of transformers is one."""

    encodings: Any = None

    def __init__(self, **tensors: Any) -> None:
        super().__init__(tensors)
        self.encodings = ["of a tokenizer"]


class Pair(NamedTuple):
    x: torch.Tensor
    name: str


class Cuda:
    """Stands for `torch.cuda` on a machine with GPUs."""

    def __init__(self) -> None:
        self.gpus = 2
        self.late = False  # whether it was initialized before
        self.chosen: list[Any] = []  # what was made the current device

    def is_available(self) -> bool:
        return self.gpus > 0

    def is_initialized(self) -> bool:
        return self.late

    def device_count(self) -> int:
        return self.gpus

    def set_device(self, device: Any) -> None:
        self.chosen.append(device)

    def init(self) -> None: ...

    def get_device_properties(self, device: Any) -> Any:
        return SimpleNamespace(pci_domain_id=0xFFFF, pci_bus_id=0, pci_device_id=0)

    def current_stream(self, device: Any) -> Any:
        return "all-reduce", device

    def device(self, device: Any) -> Any:
        return contextlib.nullcontext()

    def cudart(self) -> Any:
        return SimpleNamespace(
            cudaHostRegister=lambda *what: ("register", *what),
            cudaHostUnregister=lambda where: ("unregister", where),
        )

    def check_error(self, done: Any) -> None:
        self.chosen.append(done)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    """A machine with two GPUs, and triton."""
    triton: Any = ModuleType("triton")
    triton.__spec__ = ModuleSpec("triton", None)
    monkeypatch.setitem(sys.modules, "triton", triton)
    made = Cuda()
    monkeypatch.setattr(torch, "cuda", made)
    with mock.patch.dict(os.environ):
        yield made


def test_the_allocator_learns_of_the_stream_that_reads(cuda: Cuda) -> None:
    told: list[Any] = []
    fresh: Any = SimpleNamespace(is_cuda=True, device=META, record_stream=told.append)
    device.read_here(fresh)
    device.read_here(torch.ones(1))
    assert told == [cuda.current_stream(META)]


def test_host_memory_is_registered_until_it_is_freed(cuda: Cuda) -> None:
    memory = torch.zeros(3)
    unpin = pin(memory, torch.device("cuda", 1))
    assert cuda.chosen == [("register", memory.data_ptr(), 12, 0)]
    unpin()
    assert cuda.chosen[1:] == [("unregister", memory.data_ptr())]
    pin(memory, CPU)()
    assert len(cuda.chosen) == 2


def test_the_cpu_is_the_default_and_asks_for_nothing(cuda: Cuda) -> None:
    cuda.gpus = 0
    before = dict(os.environ)
    assert device.choose(Config().train.device, 3) == CPU
    assert device.describe("cpu", 9) == "cpu"
    assert device.backend(CPU) == "gloo"
    assert device_plane(CPU, Arena(), Settings(), 8) is None
    device.prepare("cpu", 600.0)
    assert (cuda.chosen, dict(os.environ)) == ([], before)


def test_ranks_get_the_gpu_of_their_number_on_the_machine(cuda: Cuda) -> None:
    expected = [torch.device("cuda", n % 2) for n in range(3)]
    assert [device.choose("cuda", n) for n in range(3)] == cuda.chosen == expected
    assert device.describe("cuda", 2) == "2 GPUs"
    assert device.backend(torch.device("cuda", 1)) == "cpu:gloo,cuda:nccl"


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    "given", [{}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "9"}]
)
def test_cuda_and_nccl_get_their_environment_or_a_warning(cuda, caplog, late, given) -> None:
    cuda.late = late
    for key in [key for key in os.environ if key.startswith(("CUDA_", "TORCH_NCCL"))]:
        del os.environ[key]
    os.environ.update(given)
    device.prepare("cuda", 600.0)
    warned = [record.getMessage() for record in caplog.records]
    assert sum("too late" in line for line in warned) == late * (not given)
    assert sum("CUDA_DEVICE_MAX_CONNECTIONS is 1" in line for line in warned) == bool(given)
    assert "CUDA_MODULE_LOADING" not in os.environ, "torch sets LAZY"
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"
    assert os.environ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] == "660"


def test_a_machine_that_cannot_is_refused_in_one_line(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(lambda: device.describe("cuda", 3), "at most 2, the number of GPUs")
    monkeypatch.setitem(sys.modules, "triton", None)
    refused(lambda: device.describe("cuda", 1), "install triton")
    cuda.gpus = 0
    refused(lambda: device.choose("cuda", 0), r"train\.device: got 'cuda'; allowed: cpu: this machine has no GPU")
    assert cuda.chosen == []


def test_batches_move_with_their_shape() -> None:
    x = torch.zeros(2)
    batch = ([x, 1], {"a": x}, Pair(x, "n"))
    assert prefetch.move(batch, CPU) is batch
    (first, one), mapping, pair = prefetch.move(batch, META)
    assert [t.device for t in (first, mapping["a"], pair.x)] == [META] * 3
    assert (one, pair.name, type(pair)) == (1, "n", Pair)


def test_a_mapping_keeps_its_class_and_its_attributes_on_the_way() -> None:
    encoding = Encoding(input_ids=torch.zeros(2, 3))
    moved = prefetch.move(encoding, META)
    assert type(moved) is Encoding
    assert moved.encodings == ["of a tokenizer"]
    assert moved["input_ids"].device == META
    assert encoding["input_ids"].device == CPU
    moved = prefetch.move(MappingProxyType({"a": torch.zeros(2)}), META)
    assert moved["a"].device == META


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        (torch.zeros(2, 3), 6),
        ((torch.zeros(2, 3), torch.zeros(2)), 6),
        ({"labels": torch.zeros(2), "input_ids": torch.zeros(2, 5)}, 10),
        (Encoding(mask=torch.zeros(9), input_ids=torch.zeros(2, 3)), 6),
        ({"pixels": torch.zeros(2, 3, 4), "label": 1}, 24),
        ({"input_ids": [[1, 2]], "more": torch.zeros(7)}, 7),
        (["text", {"a": None, "b": [torch.zeros(4)]}], 4),
        ("text", 0),
        (None, 0),
    ],
)
def test_the_tokens_of_a_batch_are_its_input_ids_or_its_first_tensor(batch: Any, tokens: int) -> None:
    assert prefetch.count_tokens(batch) == tokens


def test_a_tensor_on_the_cpu_is_complete_and_on_the_host() -> None:
    x = torch.zeros(2)
    assert device.written(x) is None
    assert device.on_host(x) is x


@pytest.mark.parametrize(("error", "code"), [(LocalSystemError("the GPU is gone"), 76), (RuntimeError("?"), 75)])
def test_a_broken_device_ends_the_rank_as_broken_hardware(error, code, monkeypatch, capsys) -> None:
    runtime = object.__new__(RankRuntime)
    runtime._ending = False
    ended: list[tuple[str, int]] = []
    monkeypatch.setattr(runtime, "end", lambda why, code: ended.append((why, code)))
    runtime._crash({"message": "an all-reduce cannot go on", "exception": error})
    assert ended == [(f"the control loop failed: an all-reduce cannot go on: {error}", code)]
    assert str(error) in capsys.readouterr().err, "the stack, too"


def test_each_use_and_place_has_a_stream_of_its_own() -> None:
    seeds = {stream(s, use, *at) for s in (0, 1) for use in ("init", "batch") for at in ((0, 1), (1, 0), ("0/1",))}
    assert len(seeds) == 2 * 2 * 2, 'only (0, 1) and ("0/1",) are one place'
    assert stream(0, "batch", 3, 1) == stream(0, "batch", 3, 1)
    assert all(0 <= seed < 2**63 for seed in seeds)
    torch.manual_seed(max(seeds))


def test_a_rank_is_bound_to_the_processors_of_its_gpu_that_it_may_use(tmp_path: Path) -> None:
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    assert device.local_cpus(gpu, tmp_path) == set(), "no such device is listed"
    here = tmp_path / "bus/pci/devices/0000:3b:00.0"
    here.mkdir(parents=True)
    allowed = os.sched_getaffinity(0)
    for text, cpus in (("0-4095\n", allowed), (f"{min(allowed)},4000-4001\n", {min(allowed)}), ("\n", set())):
        (here / "local_cpulist").write_text(text)
        assert device.local_cpus(gpu, tmp_path) == cpus


def test_only_a_job_on_a_device_may_import_the_kernels() -> None:
    root = Path(ft_hsdp.__file__).parent
    users = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        for line in path.read_text().splitlines()
        if line.lstrip().startswith(("import ", "from ")) and ("ftar_kernels" in line or "dataplane.gpu" in line)
    }
    assert users <= {"ftar/dataplane/gpu.py", "train/device.py"}

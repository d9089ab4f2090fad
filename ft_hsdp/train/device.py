"""The device of a rank: which one it is, what depends on it, and how tensors on it are waited for and copied."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import mmap
import os
import platform
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ft_hsdp.core.ring import RingPlan
from ft_hsdp.errors import ConfigError
from ft_hsdp.ftar.settings import Settings as RingSettings
from ft_hsdp.ftar.transport.arena import Arena, pin

if TYPE_CHECKING:
    from ft_hsdp.ftar.dataplane.gpu import GpuPlane

Summarize = Callable[[torch.Tensor, Sequence[tuple[int, int]]], Callable[[], tuple[str, list[float]]]]
"""Begins to look at a flat tensor on a device, on the current stream. Returns what waits for the findings: the
digest of all, and the sum of squares of each span of elements, as fp32."""

_CUDA = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}  # streams that share a queue wait for each other's kernels
# A rank that dies takes its replica along, so nobody is there to read a dump.
_NCCL = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_ENABLE_MONITORING": "1"}
_BEAT_S = 480  # torch's own: how long NCCL's watchdog may stand still before the monitor ends the process
_log = logging.getLogger(__name__)


def describe(name: str, ranks: int) -> str:
    """Return in words what ``train.device`` stands for on this machine, with ``ranks`` of a replica here."""
    if name == "cpu":
        return name
    if not torch.cuda.is_available():
        why = "no driver shows one" if torch.version.cuda else f"torch {torch.__version__} is built without CUDA"
        raise ConfigError("train.device", name, f"cpu: this machine has no GPU ({why})")
    if importlib.util.find_spec("triton") is None:
        raise ConfigError("train.device", name, "cpu, or install triton, which FTAR needs on a GPU")
    count = torch.cuda.device_count()
    if count < ranks:  # NCCL refuses two ranks of a replica on one GPU
        raise ConfigError("ranks_per_replica", ranks, f"at most {count}, the number of GPUs here")
    return "1 GPU" if count == 1 else f"{count} GPUs"


def prepare(name: str, longest_s: float) -> None:
    """Set what CUDA and NCCL read from the environment once, and warn of what is otherwise or too late.

    Args:
        longest_s: How long a step may last, in seconds; NCCL's monitor must not end a rank before.
    """
    if name == "cpu":
        return
    late = torch.cuda.is_initialized()
    for key, value in _CUDA.items():
        given = os.environ.get(key)
        if given is None and late:
            _log.warning("%s=%s comes too late: CUDA was initialized before ft_hsdp.join", key, value)
        elif given not in (None, value):
            _log.warning("%s is %s in the environment; FTAR's kernels want %s", key, given, value)
        os.environ.setdefault(key, value)
    for key, value in _NCCL.items():
        os.environ.setdefault(key, value)
    beat_s = max(int(os.environ.get("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", _BEAT_S)), int(longest_s) + 60)
    os.environ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] = str(beat_s)


def be_deterministic() -> None:
    """Have torch use only operators that give the same bits each time, and refuse others (FT-HSDP §2.2).

    To be called before cuBLAS is used: it reads the size of its workspace once.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    for enable in torch.backends.cuda.enable_flash_sdp, torch.backends.cuda.enable_mem_efficient_sdp:
        enable(False)
    torch.backends.cuda.enable_cudnn_sdp(False)


def choose(name: str, local_rank: int) -> torch.device:
    """Return the device of the rank ``local_rank`` of its machine; it becomes this thread's current one."""
    if name == "cpu":
        return torch.device("cpu")
    describe(name, 1)
    device = torch.device(name, local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.cuda.init()
    if near := local_cpus(torch.cuda.get_device_properties(device)):
        os.sched_setaffinity(0, near)  # later threads inherit it, and pinned memory comes from there
    return device


def local_cpus(gpu: Any, system: Path = Path("/sys")) -> set[int]:
    """Return the processors of a GPU's NUMA node that this thread may use; none if the node is not known.

    Args:
        gpu: Its properties, as torch has them, with its PCI address.
    """
    try:
        text = (system / "bus/pci/devices" / _pci_address(gpu) / "local_cpulist").read_text(encoding="utf-8")
    except OSError:
        return set()
    ranges = (part.partition("-") for part in text.strip().split(",") if part)
    near = {cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)}
    return near & os.sched_getaffinity(0)


def pci_address(device: torch.device) -> str:
    """Return the PCI address of a GPU; "" on a CPU."""
    return "" if device.type == "cpu" else _pci_address(torch.cuda.get_device_properties(device))


def _pci_address(gpu: Any) -> str:
    return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"


def numerics(device: torch.device) -> str:
    """Return what the bits of a sum depend on besides its operands: build, instruction set or GPU, threads."""
    if device.type == "cpu":
        unit = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    else:
        unit = torch.cuda.get_device_name(device)
    return f"torch {torch.__version__}, {unit}, {torch.get_num_threads()} threads"


def backend(device: torch.device) -> str:
    """Return torch.distributed's backend inside a replica; tensors outside the model stay on the CPU."""
    return "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"


def device_plane(
    device: torch.device, arena: Arena, settings: RingSettings, largest: int, wire: torch.dtype | None = None
) -> GpuPlane | None:
    """Return a data plane on ``device`` for fp32 messages of up to ``largest`` elements; some go as ``wire``."""
    if device.type == "cpu":
        return None
    from ft_hsdp.ftar.dataplane.gpu import GpuPlane  # triton is not needed elsewhere

    plane = GpuPlane(device, arena, settings.timeout_s)
    # A ring of one: no larger ring has larger chunks.
    plane.reserve(RingPlan.cut(largest, 4, 1, settings.slots, settings.chunk_bytes), torch.float32, wire)
    return plane


def device_summaries(device: torch.device) -> Summarize | None:
    """Return what looks at tensors on ``device``, with its kernels loaded; None on a CPU. Blocks meanwhile."""
    if device.type == "cpu":
        return None
    from ftar_kernels import summary  # triton is not needed elsewhere

    summary.warm_up(device)
    return summary.summarize


def written(tensor: torch.Tensor) -> torch.cuda.Event | None:
    """Return what to wait for before another stream reads ``tensor``: the current stream's work; None on a CPU."""
    return torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None


def told(number: torch.Tensor) -> torch.Tensor:
    """Return a tensor of one element in host memory, which has its value when the device has come so far.

    Does not block: the current stream copies it. Whoever reads it has heard of later work of that stream.
    """
    value = number.detach().reshape(())
    if not value.is_cuda:
        return value.clone()
    return torch.empty((), dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)


def read_here(tensor: torch.Tensor) -> None:
    """Keep the memory of ``tensor`` until this thread's current stream has read it; nothing on a CPU.

    To be called before the last reference goes, if another stream has allocated it: the allocator knows that
    stream alone, and would give the memory to its next tensor at once.
    """
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


@contextlib.contextmanager
def reading(device: torch.device, after: torch.cuda.Event | None) -> Iterator[None]:
    """Read tensors within a ``with`` block on a stream of its own, when ``after`` is done.

    Blocks at the end of the block until they are read. Without it a thread reads on the stream that is current
    there, which waits for no other one. Nothing if ``after`` is None.
    """
    if after is None:
        yield
        return
    stream = _copies(device)
    stream.wait_event(after)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


@contextlib.contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """Work within a ``with`` block on a stream before all others, which waits for none; nothing on a CPU."""
    if device.type == "cpu":
        yield
        return
    with torch.cuda.stream(_first(device)):
        yield


def finish(device: torch.device) -> None:
    """Block until the device has done all that this thread's current stream holds; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def seed_torch(seed: int) -> None:
    """Seed torch's generators, as ``torch.manual_seed`` does.

    It is quicker on a CPU, where ``torch.manual_seed`` keeps the caller's stack for the time when CUDA is used.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def moved_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor on a device, in pinned memory that is freed with it; one on the host as it is.

    Blocks until it is there. torch's own pinned memory would be up to twice as large, and is never given back.
    """
    if not tensor.is_cuda:
        return tensor
    memory = mmap.mmap(-1, tensor.nbytes)
    host = torch.frombuffer(memory, dtype=tensor.dtype)
    weakref.finalize(memory, pin(host, tensor.device)).atexit = False
    host.copy_(tensor)
    return host


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a complete tensor in host memory, copied if need be; does not wait for the computation under way."""
    if not tensor.is_cuda:
        return tensor
    with torch.cuda.stream(_copies(tensor.device)):
        return tensor.cpu()


@cache
def _copies(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@cache
def _first(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)

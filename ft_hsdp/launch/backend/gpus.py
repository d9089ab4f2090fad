"""The GPUs of this machine: whether they suffice, and which of them the ranks of each replica use.

torch is imported only if the job computes on GPUs.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence

from ft_hsdp.config import Config

VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"


def check_device(config: Config, hosts: int = 1) -> str:
    """Return in words the device on which ranks compute.

    Args:
        hosts: Over how many machines the ranks of a replica are spread evenly.

    Raises:
        ConfigError: This machine lacks the devices that train.device names.
    """
    if config.train.device == "cpu":
        return config.train.device
    # Counting GPUs must not initialize CUDA, here or in the fork server, which inherits the variable.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    from ft_hsdp.train.device import describe  # a job on CPUs starts without torch in this process

    return describe(config.train.device, config.ranks_per_replica // hosts)


def gpus_here(config: Config, hosts: int = 1) -> tuple[str, ...]:
    """Return the GPUs of this machine that the job may use; () if ranks compute on the CPU; as `check_device`.

    Raises:
        ConfigError: This machine lacks the devices that train.device names.
    """
    if config.train.device == "cpu":
        return ()
    check_device(config, hosts)
    import torch  # `check_device` has loaded it

    return visible(torch.cuda.device_count(), os.environ)


async def free_gpus(
    gpus: Sequence[str], ranks: int, take: Callable[[str], Awaitable[object]], say: Callable[[str], None]
) -> Sequence[str]:
    """Return a GPU for each rank that no other agent of this machine uses; all of them if too few are free.

    Args:
        ranks: How many ranks may run here at once, those of spares among them.
        take: Takes a name on this machine until the host ends; nothing is returned if another process has it.
        say: Takes lines for people.
    """
    free: list[str] = []
    for gpu in gpus:
        if len(free) < ranks and await take(f"ft_hsdp/gpu/{gpu}"):
            free.append(gpu)
    if len(free) < min(ranks, len(gpus)):
        say(f"only {len(free)} of {len(gpus)} GPUs are not used by other agents of this machine: they are shared")
        return gpus
    return free


def visible(count: int, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES has them.

    Args:
        count: How many there are, by the driver, with that variable considered.
        environment: Of this process.
    """
    named = [name.strip() for name in environment.get(VISIBLE, "").split(",") if name.strip()]
    return tuple(named[:count]) if named else tuple(map(str, range(count)))


class GpuShares:
    """Gives the ranks of a replica one GPU each, and those first that the fewest ranks of others use.

    Each rank of each replica has a GPU of its own while they suffice. A replica that is started again gets those
    that its last incarnation has left. A spare has GPUs like a replica, because it initializes CUDA before it is
    assigned.
    """

    def __init__(self, gpus: Sequence[str]) -> None:
        self._gpus = gpus
        self._ranks: Counter[str] = Counter()  # that use each

    def take(self, ranks: int) -> tuple[str, ...]:
        """Return a GPU for each of ``ranks`` ranks, which use them from now on; () if the job uses no GPUs.

        They are different ones, because NCCL refuses two ranks of a replica on one GPU.
        """
        freest = sorted(self._gpus, key=lambda gpu: (self._ranks[gpu], self._gpus.index(gpu)))[:ranks]
        chosen = tuple(sorted(freest, key=self._gpus.index))
        self._ranks.update(chosen)
        return chosen

    def hold(self, environment: Mapping[str, str]) -> str:
        """Note that a rank runs, and return the GPU that it uses, as its environment has it; "": none."""
        named = environment.get(VISIBLE, "").split(",") if self._gpus else [""]
        gpu = named[int(environment["LOCAL_RANK"])] if len(named) > 1 else named[0]
        self._ranks[gpu] += 1
        return gpu

    def leave(self, gpu: str) -> None:
        """Let others have the GPU of a rank that has exited."""
        self._ranks[gpu] -= 1


def environment(chosen: Sequence[str]) -> dict[str, str]:
    """Return the variables that make a rank of a replica see its replica's GPUs alone.

    The rank takes the one whose index is its LOCAL_RANK. NVML counts GPUs in the order of their bus addresses, so
    CUDA has to, too, unless the user has named GPUs or an order: then the names keep their meaning.
    """
    if not chosen:
        return {}
    ordered = {} if {VISIBLE, ORDER} & os.environ.keys() else {ORDER: "PCI_BUS_ID"}
    return {**ordered, VISIBLE: ",".join(chosen)}

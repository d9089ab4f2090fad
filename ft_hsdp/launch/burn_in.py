"""`hosts.check`: a machine tries its processors, GPUs, memory and disk before it joins a job.

Each device computes exactly with these whole numbers, in whatever order it adds, so what is right is known. The
check, `python -m ft_hsdp.launch.burn_in CONFIG FOLDER`, is a process of its own: it may crash or hang.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path

from ft_hsdp import fault_injection
from ft_hsdp.config import Config, load
from ft_hsdp.core.restart import exit_in_words
from ft_hsdp.errors import one_line
from ft_hsdp.launch.backend.processes import environment, tied

TILE, TIMES = 64, 32  # side of the square that a matrix repeats, and how often in a row
WORDS, SHARE = 1 << 23, 64  # of 8 bytes at once, of host memory and disk; of a GPU one for so many free bytes


async def failure(config: Config, file: Path, folder: Path) -> str:
    """Return in one line what is wrong with this machine; "": nothing. Takes `timeouts.boot_s` more at most."""
    last, end, limit_s = "it did not begin", "", config.hosts.check + config.timeouts.boot_s
    there = {**environment(), "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    command = tied("ft_hsdp.launch.burn_in", str(file), str(folder))
    child = await asyncio.create_subprocess_exec(*command, env=there, stdout=PIPE, stderr=STDOUT)
    try:
        async with asyncio.timeout(limit_s):
            while line := await child.stdout.readline():  # type: ignore[union-attr]
                last = one_line(line.decode(errors="replace")) or last
            end = exit_in_words(await child.wait())
    except TimeoutError:
        child.kill()  # its end might not come either
    return "" if end == "exit 0" else f"hosts.check: {last[:200]} ({end or f'not over after {limit_s:g} s'})"


def main(file: Path, folder: Path) -> str:
    """Try this machine for `hosts.check` seconds, all of it at least once; return in one line what is wrong."""
    import torch

    config = load(file)
    fault_injection.arm(config.debug.failpoints, 0, 0, 0)
    torch.set_float32_matmul_precision("high")  # for tensor cores
    a, b = torch.randint(-8, 9, (2, TILE, TILE), generator=torch.Generator().manual_seed(1))
    left, right, product = (each.float().tile(TIMES, TIMES) for each in (a, b, TIMES * (a @ b)))

    def odd(found: torch.Tensor, wanted: torch.Tensor) -> str:
        wrong = (found != wanted).flatten().nonzero().flatten().tolist()
        saw = [f"number {n} is {found.flatten()[n]:g}, not {wanted.flatten()[n]:g}" for n in wrong[:1]]
        return f"{len(wrong)} of {wanted.numel()} values are wrong: {saw[0]}" if saw else ""

    def products(device: str) -> str:
        found = left.to(device) @ right.to(device)
        if fault_injection.hit("check-flip", 0):
            found.view(torch.int32)[0, 3] ^= 1 << 30
        return odd(found, product.to(device))

    def memory(device: str) -> str:
        words = WORDS if device == "cpu" else torch.cuda.mem_get_info(device)[0] // SHARE
        numbers = torch.arange(words, device=device)
        return odd((numbers ^ -1) ^ -1, numbers) or odd((numbers ^ 0x5555) ^ 0x5555, numbers)

    def disk(where: str) -> str:
        numbers = torch.arange(WORDS)
        with tempfile.TemporaryFile(dir=where) as written:
            written.write(numbers.numpy().data)
            written.flush()
            os.fsync(written.fileno())
            os.posix_fadvise(written.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            written.seek(0)
            return odd(torch.frombuffer(bytearray(written.read()), dtype=torch.int64), numbers)

    gpus = range(torch.cuda.device_count() if config.train.device != "cpu" else 0)
    devices = [(each, device) for device in ("cpu", *(f"cuda:{n}" for n in gpus)) for each in (products, memory)]
    until = time.monotonic() + config.hosts.check
    while True:
        for attempt, where in [(disk, str(folder)), *devices]:
            print(name := f"{attempt.__name__} of {where}", flush=True)  # noqa: T201 - for `failure`
            try:
                wrong = attempt(where)
            except (OSError, RuntimeError, MemoryError) as error:
                wrong = f"{type(error).__name__}: {error}"
            if wrong:
                return one_line(f"{name}: {wrong}")
        if time.monotonic() >= until:
            return ""


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])) or 0)

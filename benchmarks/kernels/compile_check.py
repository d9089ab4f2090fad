"""What the kernels compile to on sm_90, without a GPU: `python -m benchmarks.kernels.compile_check`.

It allows at most 64 registers a thread and nothing in local memory: then 512 threads leave room on the SM for one
more such program, beside which other kernels run. All accesses to a block must be of 16 bytes; a wait must have
its acquire, an answer its release. `launch_problems` checks what a launch makes of its arguments: a second variant
would be compiled and loaded in the middle of training, where the driver waits until the device is idle.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

from benchmarks.kernels.stepped import kernel
from ftar_kernels import handshake, summary
from ftar_kernels.flags import FlagPage, host_buffer
from ftar_kernels.persistent import persistent_kernel
from ftar_kernels.reduce_copy import BLOCK_BYTES, OPTIONS, WARPS, shape

REGISTERS = 64
UNROLLED = BLOCK_BYTES // (16 * 32 * WARPS)  # accesses of 16 bytes of each thread to a block
DEPTH = 64  # commands at once, as a plane has them
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True, slots=True)
class Figures:
    """What a kernel compiled to for one type; accesses are counted as instructions, not as executions."""

    name: str
    dtype: str
    stages: int
    registers: int
    stack: int
    local: int
    wide_loads: int
    wide_stores: int
    async_loads: int
    edge_loads: int
    edge_stores: int
    acquires: int
    releases: int
    invalidates: int
    fences: int
    votes: int

    def problems(self) -> list[str]:
        """Return what is wrong with the kernel; an empty list if nothing is."""
        waits, narrow = self.name.startswith("persistent"), self.name.endswith("narrow")
        # A block has UNROLLED accesses of a thread where its edge has one, and half as many if it travels as
        # bf16; a narrow block has many more.
        least = UNROLLED // 2 if narrow else UNROLLED
        found = [
            (self.registers > REGISTERS, f"{self.registers} registers, {REGISTERS} are allowed"),
            (
                self.stack > 8 * narrow or self.local > 4 * narrow,  # ptxas keeps two words of a command there
                f"{self.stack} bytes of stack, {self.local} accesses to local memory",
            ),
            (
                not least * self.edge_loads <= self.wide_loads + self.async_loads > 0,
                f"{self.wide_loads + self.async_loads} loads of 16 bytes beside {self.edge_loads} narrow ones",
            ),
            (
                not least * self.edge_stores <= self.wide_stores > 0,
                f"{self.wide_stores} stores of 16 bytes beside {self.edge_stores} narrow ones",
            ),
            (waits and self.acquires != 1, f"{self.acquires} acquires in a wait instead of 1"),
            (waits and not self.invalidates, "the acquire was optimized away"),
            (waits and not (self.releases and self.fences), "no release"),
            (waits and not self.votes, "the verdict of a wait is not shared in its barrier"),
        ]
        return [f"{self.name} {self.dtype}: {text}" for wrong, text in found if wrong]


def compile_kernel(
    fn: Any, dtype: torch.dtype, stages: int, wire: torch.dtype | None = None, **constants: Any
) -> Figures:
    """Compile `fn` for tensors of `dtype`, and for buffers of `wire`, on sm_90; count what it consists of."""
    constants = {"STAGES": stages, **shape(dtype, wire), **constants}
    types = {
        **dict.fromkeys(("send", "recv"), "*" + DTYPES[wire or dtype]),
        "words": "*i32",
        "commands": "*i64",
        "silence_ns": "i64",
        "count": "i32",
        "size": "i32",
    }
    signature = {
        name: "constexpr" if name in constants else types.get(name, "*" + DTYPES[dtype]) for name in fn.arg_names
    }
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(fn.arg_names) if signature[name].startswith("*")
    }
    compiled = triton.compile(
        ASTSource(fn, signature, constants, aligned),
        target=GPUTarget("cuda", 90, 32),
        options=OPTIONS,
    )
    usage, code = (_cuobjdump(compiled.asm["cubin"], option) for option in ("-res-usage", "-sass"))
    ops = Counter(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+ )?([A-Z][A-Z0-9_.]*)", code, re.MULTILINE))
    ptx = compiled.asm["ptx"]

    def count(pattern: str) -> int:
        return sum(n for op, n in ops.items() if re.fullmatch(pattern, op))

    registers = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert registers is not None, usage
    return Figures(
        name=fn.__name__ + "".join(f" {k.lower()}" for k, v in constants.items() if v is True),
        dtype=DTYPES[dtype],
        stages=stages,
        registers=int(registers[1]),
        stack=int(registers[2]),
        local=count(r"(LDL|STL)\b.*"),
        wide_loads=count(r"LDG\.E\.128.*"),
        wide_stores=count(r"STG\.E\.128.*"),
        async_loads=count(r"LDGSTS\..*128.*"),
        edge_loads=count(r"LDG\.E(?!.*\.(128|SYS)).*"),  # what is read for the whole system are commands and flags
        edge_stores=count(r"STG\.E(?!.*\.(128|SYS)).*"),
        acquires=len(re.findall(r"ld\.acquire\.sys", ptx)),
        releases=len(re.findall(r"st\.release\.sys", ptx)),
        invalidates=count(r"CCTL\.IVALL"),
        fences=count(r"MEMBAR\..*SYS"),
        votes=count(r"BAR\.RED\.OR.*"),
    )


def _cuobjdump(cubin: bytes, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, option, file.name], capture_output=True, text=True, check=True
        ).stdout


def figures() -> list[Figures]:
    """Compile all kernels as they are used, and the persistent one with staged loads as well.

    Raises:
        RuntimeError: the kernels were made for the interpreter.
    """
    if handshake.INTERPRETED:
        raise RuntimeError("with TRITON_INTERPRET=1 nothing is compiled; unset it for the compile check")
    found = []
    narrow = compile_kernel(persistent_kernel, torch.float32, 1, torch.bfloat16, DEPTH=DEPTH)
    found.append(replace(narrow, name=f"{narrow.name} narrow"))
    for dtype in DTYPES:
        for stages in (1, 3):
            found.append(compile_kernel(persistent_kernel, dtype, stages, DEPTH=DEPTH))
        for reduces in (True, False):
            for two in (True, False):
                found.append(compile_kernel(kernel, dtype, 1, REDUCES=reduces, TWO=two))
    return found


class _NoDevice:
    """Stands for Triton's driver of an sm_90 device. Nothing is loaded or launched."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """Return the number of the only device."""
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Return where torch has the tensors: on the host."""
        return torch.device("cpu")

    def map_python_to_cpp_type(self, name: str) -> str:
        """Return the type of an argument in the launcher's source."""
        return name


def summary_problems() -> list[str]:
    """Compile the kernels of a summary for sm_90 in all their variants, and return what is wrong with them.

    None may use local memory. A digest begins where a tensor does, so it is loaded 16 bytes at a time.
    """
    found: list[str] = []
    pointers = {"words": "*i32", "digests": "*i64", "squares": "*fp64", "start": "i64", "stop": "i64"}
    for digest, square in ((True, True), (True, False), (False, True)):
        constants = {"DIGEST": digest, "SQUARE": square, **summary.SIZES}
        found += _summary_problems(summary.block_kernel, pointers, constants, wide=digest)
    for dtype in ("i64", "fp64"):
        types = {"parts": f"*{dtype}", "out": f"*{dtype}", "place": "i32", "blocks": "i32"}
        found += _summary_problems(summary.fold_kernel, types, {"FOLD": summary.FOLD}, wide=False)
    return found


def _summary_problems(fn: Any, types: dict[str, str], constants: dict[str, Any], wide: bool) -> list[str]:
    signature = {name: "constexpr" if name in constants else types[name] for name in fn.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(fn.arg_names) if signature[name].startswith("*")
    }
    compiled = triton.compile(
        ASTSource(fn, signature, constants, aligned),
        target=GPUTarget("cuda", 90, 32),
        options=summary.OPTIONS,
    )
    usage, code = (_cuobjdump(compiled.asm["cubin"], option) for option in ("-res-usage", "-sass"))
    name = " ".join([fn.__name__, *(k.lower() for k, v in constants.items() if v is True)])
    problems = [("STACK:0" not in usage, "uses local memory"), (wide and "LDG.E.128" not in code, "no wide load")]
    return [f"{name} {text}" for wrong, text in problems if wrong]


def launch_problems() -> list[str]:
    """Launch the persistent kernel as a plane does, on a driver without a device, and return what is wrong.

    Each type must have one variant, whatever the number of commands and the silence; the silence must be 64 bits
    wide, and the compiler must know that all pointers are divisible by 16. This process can launch nothing on a
    device afterwards.
    """
    cpu = torch.device("cpu")
    page = FlagPage(host_buffer(FlagPage.nbytes(2, DEPTH), cpu), 2, DEPTH)
    found: list[str] = []
    driver.set_active(_NoDevice())
    for dtype, name in DTYPES.items():
        buffer = host_buffer(4096, cpu).view(dtype)
        pointers = (buffer, buffer, buffer, buffer, page.words, page.commands)
        variants = set()
        for count, silence_s in itertools.product((1, 16, 10**9), (0.05, 30.0, 64.0)):
            compiled = persistent_kernel.warmup(
                *pointers, count, int(silence_s * 1e9), grid=(2,), DEPTH=DEPTH, STAGES=1, **OPTIONS,
                **shape(dtype),
            )  # fmt: skip
            variants.add(compiled.hash)
        aligned = {place[0] for place, marks in compiled.src.attrs.items() if ["tt.divisibility", 16] in marks}
        wide = compiled.src.signature["silence_ns"]
        problems = [
            (len(variants) > 1, f"{len(variants)} variants instead of 1"),
            (aligned != set(range(len(pointers))), f"only arguments {sorted(aligned)} are aligned"),
            (wide != "i64", f"the silence is {wide} instead of i64"),
        ]
        found += [f"launch {name}: {text}" for wrong, text in problems if wrong]
    return found


def table(rows: list[Figures]) -> str:
    head = ["kernel", "type", "stages", "registers", "stack", "loads", "async", "stores", "acquires", "releases"]
    lines = [head, ["---"] * len(head)]
    lines += [
        [r.name, r.dtype, *map(str, (r.stages, r.registers, r.stack, r.wide_loads, r.async_loads, r.wide_stores)),
         str(r.acquires), str(r.releases)]
        for r in rows
    ]  # fmt: skip
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def main(arguments: list[str]) -> int:
    """Print the figures, as JSON with `--json`; return 1 if something is wrong."""
    rows = figures()
    problems = [text for row in rows for text in row.problems()] + summary_problems() + launch_problems()
    if "--json" in arguments:
        sys.stdout.write(json.dumps([asdict(row) for row in rows]) + "\n")
    else:
        sys.stdout.write(table(rows))
    sys.stderr.write("".join(f"{text}\n" for text in problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

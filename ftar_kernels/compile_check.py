"""Checks what the kernels compile to on sm_90, without a GPU. Run it as `python -m ftar_kernels.compile_check`.

It allows at most 64 registers a thread and nothing in local memory: then 512 threads leave room on the SM for one
more such program, beside which other kernels run. It also asks for accesses of 16 bytes, the acquire of a wait and
the release of an answer.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ftar_kernels import handshake
from ftar_kernels.persistent import command_kernel, persistent_kernel
from ftar_kernels.reduce_copy import WARPS, kernel, shape

REGISTERS = 64
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
    acquires: int
    releases: int
    invalidates: int
    fences: int
    votes: int

    def problems(self) -> list[str]:
        """Return what is wrong with the kernel; an empty list if nothing is."""
        waits = self.name.startswith("persistent")
        found = [
            (self.registers > REGISTERS, f"{self.registers} registers, {REGISTERS} are allowed"),
            (self.stack + self.local > 0, f"{self.stack} bytes of stack, {self.local} accesses to local memory"),
            (not self.wide_loads + self.async_loads, "no 16-byte loads"),
            (not self.wide_stores, "no 16-byte stores"),
            (waits and self.acquires != 1, f"{self.acquires} acquires in a wait instead of 1"),
            (waits and not self.invalidates, "the acquire was optimized away"),
            (waits and not (self.releases and self.fences), "no release"),
            (waits and not self.votes, "the verdict of a wait is not shared in its barrier"),
        ]
        return [f"{self.name} {self.dtype}: {text}" for wrong, text in found if wrong]


def compile_kernel(fn: Any, dtype: torch.dtype, stages: int, **constants: Any) -> Figures:
    """Compile `fn` for buffers of `dtype` on sm_90, and count what it consists of."""
    constants |= {"STAGES": stages, **shape(dtype)}
    types = {
        "words": "*i32",
        "commands": "*i64",
        "silence_ns": "i64",
        "count": "i32",
        "index": "i32",
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
        options={"num_warps": WARPS},
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
    for dtype in DTYPES:
        for stages in (1, 3):
            found.append(compile_kernel(persistent_kernel, dtype, stages, DEPTH=64))
        found.append(compile_kernel(command_kernel, dtype, 1, DEPTH=64))
        for reduces in (True, False):
            for two in (True, False):
                found.append(compile_kernel(kernel, dtype, 1, REDUCES=reduces, TWO=two))
    return found


def table(rows: list[Figures]) -> str:
    """Return the figures as a Markdown table."""
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
    problems = [text for row in rows for text in row.problems()]
    if "--json" in arguments:
        sys.stdout.write(json.dumps([asdict(row) for row in rows]) + "\n")
    else:
        sys.stdout.write(table(rows))
    sys.stderr.write("".join(f"{text}\n" for text in problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

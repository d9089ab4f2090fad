"""The bench of the kernels: `python -m benchmarks.kernels` checks them first and measures them afterwards.

Without a GPU it names the sections that need one, and runs the compile check and the interpreter's checks. Each
section runs in a process of its own under a time limit, so that a kernel that hangs spoils no other section.

Read the modules in this order:

    sections    the parts of the bench by name, in the order of their value
    compile_check  what the kernels compile to on sm_90; needs no GPU
    ladder      one mechanism after the other: the first that fails names the fault
    blocking    which calls wait for a kernel that spins
    rates       what the machine is, and how fast it moves and hashes a gradient
    reference   what the kernels must compute, in torch
    checks      kernels, commands and rings against the reference, on fresh random data
    limits      latency of a command, of an abort and of a deadline
    speed       bandwidth of the kernels, alone and beside a matmul
    ring        a ring of members through host memory, driven by threads or processes
    processes   rings of processes, one of which may be killed; worker: one such process
    nccl        NCCL's own all-reduce on the same device, for comparison
    gpu_step    a training step beside plain FSDP2, in a process of its own

All modules but gpu_step import ftar_kernels and torch only.

    python -m benchmarks.kernels --only interpreted --out results
"""

"""Triton kernels of FTAR's data plane on GPUs (FT-HSDP §4.2).

A kernel runs on the device for the length of an all-reduce. The CPU posts commands to it through a page of pinned
host memory; each command copies or adds one chunk between GPU tensors and staging buffers in host memory. The CPU
never waits for the device, and decides about failures.

Read the modules in this order:

    flags          the page by which CPU and kernel talk, and `Command`, what is done with one chunk
    plane          `StagedPlane` and `StagedJob`, what the ring's engine drives
    reduce_copy    the kernel that copies or adds a chunk, from one or two sources to one or two destinations
    handshake      how a kernel waits for the CPU and answers it (inline assembly)
    persistent     one kernel that executes all commands of an all-reduce
    streams        where it is enqueued
    summary        the digest and the squares of a sum, for the vote

`benchmarks.kernels`, in a checkout, checks and measures all of it on a GPU.

The package imports torch, triton and ft_hsdp.core.ring, which needs the standard library only, and nothing else of
the product: the kernels can be checked on a machine that has only these. `ft_hsdp.ftar.dataplane.gpu` and
`ft_hsdp.train.device` alone import this package; the CPU path needs neither it nor triton.

    plane = StagedPlane(device, recv, send)
    job = plane.open(local, out, count=1)
    job.post(Command(OperationKind.COPY_SEND, 0, 1024, None, 0))
    while not job.completed(): ...
    job.close(failed=False)
"""

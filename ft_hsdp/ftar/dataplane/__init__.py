"""Data planes: copy and add the chunks of an all-reduce.

`allreduce.Exchange` decides what happens to a chunk; a plane does it. `Plane.open` starts one all-reduce and
returns a `PlaneJob`. The exchange posts chunks to the job, asks which are finished, and sends their outcomes.

Read the modules in this order:

    base   the protocols `Plane` and `PlaneJob`
    cpu    torch on the engine's thread; a posted chunk is finished at once
    gpu    Triton kernels on a CUDA device, staged through pinned host memory (FT-HSDP §4.2)

Only `gpu` imports triton and ftar_kernels, and only a process that sums on a device imports `gpu`: everything else
runs where triton is not installed.

    job = CpuPlane().open(local, out, plan)
    job.post(process, chunk)
    for finished in job.completed(): ...
    job.close(failed=False)
"""

"""Data: batches as a pure function of their place, and their reading ahead of time.

A place is (data shard, index, rank, micro-batch). Nothing here has a cursor: which index of which data shard is
next stands in the committed state (FT-HSDP §4.1), so a replica that recovers reads exactly what it would have
read. What is random about a batch depends on its place alone: a replica that runs it again, or another one that
runs it instead, draws the same numbers.

Read the modules in this order:

    step_plan   what one rank trains in a step
    prefetch    `Source`, from which batches come, and their reading ahead of time
    batches     the built-in trainer's data: windows of tokens
    sources     the part of `Job` that makes loaders and streams
    loader      `Loader`: batches of any map-style dataset
    samples     which samples are in a batch, and their reading
    workers     torch's DataLoader, told what is expected next
    stream      `BatchStream`: batches that can only be read in order; the state of an iterator as JSON
    facts       digests of samples and tokens, by which batches are compared

The way of a batch: the grant deals places to a replica; `StepPlan` turns them into micro-batches; `StepDriver`
asks a `Reader` for each of them and names those that will probably follow; what was trained becomes `Contribution`
rows by ``StepPlan.contributions``.
"""

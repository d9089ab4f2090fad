"""Durable checkpoints: the ranks of one replica write a snapshot to a shared folder, and any job size loads it.

A checkpoint is a folder ``step-STEP-epoch-EPOCH-INCARNATION`` with DCP's files and a signed manifest. It is
written as a draft under another name, fsynced, and renamed, so a crash leaves a whole checkpoint or none. A
reader verifies the signature and every byte before it writes a tensor, and skips what is torn. DCP's index, which
is a pickle, is never read; DCP reads each tensor with ``torch.load(weights_only=True)``.

Read the modules in this order:

- `checkpoint_manifest`: what a checkpoint is made of; its canonical encoding, digest and signature.
- `catalog`: finds and verifies the checkpoints in a folder; `resume` loads the newest into the live tensors.
- `dcp`: tensors to and from the files of torch.distributed.checkpoint, without its pickled collectives.
- `drafts`: `Draft`: the folder until it is published; removes older checkpoints and unfinished ones.
- `writer`: `Checkpointer`: the thread that writes and publishes.

Writing goes this way, on a thread beside training, as a collective of the replica's ranks:

    Checkpointer.write -> dcp.views -> dcp.save -> Draft.written_by (hashes) -> Draft.publish -> retire

`ft_hsdp.core.checkpoint` decides which replica writes which step, and `ft_hsdp.train.state.checkpointing` calls
this package. It must not import `ft_hsdp.state.agent`: a checkpoint has to be readable where no agent runs, as in
`ft_hsdp.launch.export`.

Example:
    checkpointer = Checkpointer(folder, keep, key, about, layout, params, optim, ranks)
    outcome = checkpointer.write(buffer, Header(state, ledger, hyper)).result()   # Published, or why not
    resumed = resume(folder, config_hash, params, optim, ranks, key)
"""

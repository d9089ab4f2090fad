"""Trainers of others on ft_hsdp: one module for each, which plugs a `Job` into the public seams of the trainer.

The trainer keeps its loop, its model code and its logging. The job takes over what has to be agreed among
replicas: the data, the update, and the end. So each module here does the same five things in its trainer's words:

    it joins the job before the trainer forms a process group (`ft_hsdp.join`)
    it gives the model that the trainer has sharded to the job (`Job.adopt`)
    it gives the optimizers and learning rate schedulers to the job (`Job.optimizer`)
    it replaces the trainer's data by that of the job (`Job.loader`)
    it makes the trainer's optimizer step a committed step (``optim.step``)

What a trainer does that cannot work here is refused in one line (`ConfigError`), never left out silently.

Read the modules in this order:

    epochs      a torch DataLoader as the data of the job, in passes of one epoch
    updates     optimizers and schedulers whose steps are committed steps
    files       files that every replica writes alike
    fabric      Lightning Fabric: a strategy
    accelerate  Accelerate: an accelerator
    transformers  Hugging Face's Trainer: a mixin
    torchtitan  torchtitan: a trainer
    ray_train   Ray Train: a trainer, which starts the job on a Ray cluster; the train loop is one of our own kind

A trainer is imported by its own module alone: `import ft_hsdp` imports none of them, and none is a dependency.
The examples and the pages have the names of the trainers: examples/fabric, docs/fabric.md.
"""

"""The user's optimizers inside the committed state.

A job has one optimizer or several, and each trainable parameter is in exactly one of them. Their tensors and their
hyper-parameters are part of the state, and a commit alone changes them: a replica that was away, or that began a
moment ago, has to reach the same bits as the others from the state that it fetched.

Read the modules in this order:

    given        what they were made with, and how a checkpoint differs
    committing   what the user's loop gets for its optimizer
    groups       parameter groups: hyper-parameters, the learning rates of a step, the update
    clipping     groups that are clipped by a norm of their own
    creation     the optimizers' tensors, made before the first step as torch would make them in it
    lr_schedule  torch's learning rate schedulers, stepped by the commits

The way of a commit: ``LiveState.apply`` divides and clips the sums (`groups.finish`), makes them the gradients,
and calls ``Groups.step``, which has the user's optimizers update with the rates of that step. ``Groups.advance``
then goes on to the next step, whether there was an update or not. ``Groups.hyper`` is what a manifest says of all
that, and ``Groups.adopt`` takes it from there.
"""

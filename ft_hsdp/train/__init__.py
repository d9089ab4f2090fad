"""Training: what runs inside a rank. A user's FSDP2 loop is made fault-tolerant by `Job`.

A rank has a main thread, which runs the user's loop, and a control loop on a thread of its own, which runs
everything that must not wait for it. They meet in the `Mailbox`: the control loop puts in what the leader of the
replica has ordered, and the main thread carries it out inside ``job.batches`` and ``optimizer.step``.

Read the modules in this order:

    trainer        the loop that comes with ft_hsdp, an example of the public API
    join           how a process becomes one rank of a replica
    job            the public API, and the main thread: feed, step, apply
    loop           what the user's loop hears and tells: callbacks, its own state, logged values
    identity       where a rank runs, on which device, and of which incarnation it is
    step_driver    the steps of one rank, and the orders that end each
    runtime        the control loop: ring, signs of life, what goes to the leader and to the lighthouse
    tracer         what the rank tells of its collectives, so that others find out who keeps them waiting
    rank_zero      a rank's way to its leader, the other ranks and the lighthouse; on rank 0 the leader itself
    orders         the leader's orders: carried out at once, or put into the mailbox
    gradients      a rank's gradient through FTAR, attempt by attempt
    votes          what the rank votes on its sums
    lanes          the parts of a gradient, if replicas have unequal numbers of ranks
    fsdp           (package) FSDP2 inside the replica, and its buckets
    state          a package: the committed state that the rank holds, and its copies in memory and on disk
    optimizer      a package: the user's optimizers inside that state, and torch's schedulers
    data           batches and seeds as pure functions of their place, read ahead of time
    tokens         the text of the built-in trainer as tokens
    step_log       the replica's files in the run's directory
    model          the built-in model
    replay         (package) a user's loop on the recorded steps of a finished run

One step on one rank: ``job._feed`` yields a batch; backward calls ``job._ready`` for each bucket, which goes to
``Reducer.ready``, and from there to FTAR; the last bucket sends the vote; the leaders agree, and their order
`Commit` becomes an `ApplyOrder` in the mailbox; ``job._apply`` changes the live state and has it copied.

This package stands on `ftar`, `state` and `control`, and may not import `launch`: a rank runs under any launcher.
"""

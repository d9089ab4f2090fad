"""Backends: where the ranks of a job run, and how they are started.

A `Backend` starts all ranks of one incarnation (`ReplicaSpec`) and reports each exit once to a `ProcessWatch`. A
supervisor decides when; a backend only does it. This package has the backend of one machine; `launch.ray` has that
of a cluster.

Read the modules in this order:

    base        the protocols; `WorkerGroup`: the processes of one replica, or of a spare; `ReplicaProcess`: an
                incarnation as its supervisor sees it
    local       the backend of this machine; gpus, hosts: which of its GPUs and emulated hosts the ranks use
    spares      groups that are warm, and wait for a replica that needs them; spare_agents: of spare hosts
    forkserver  the supervisor's side of the fork server
    zygote      the fork server: the preloaded process from which ranks are forked
    entry       what runs in each rank: the trainer, or the user's script or function
    children    ranks as children of the supervisor: signals, exits, adoption; rank_end: why a rank ended
    processes   how any process is started so that it does not outlive its parent

The way of a start: `LocalBackend.start` -> `SparePool.take`, or `ForkServer.spawn` -> (socket) `zygote` -> fork ->
the rank waits on its `AssignmentLine` -> it is assigned to a replica -> `entry.main`, which runs the
trainer or the user's script.

Only `entry` imports `train`, and the supervisor must not import it, or it would be as large as a rank. `zygote`,
which runs in another process, loads it by its name, with torch, before it forks.

The bench has another fork server (`bench.workers.worker`). Its workers are plain children of their server, started
by blocking code. Here a rank becomes a child of the supervisor, and gets its incarnation later, on a socket. Only
the import of the modules, a dozen lines, is the same.
"""

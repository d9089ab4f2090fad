"""Ray: a job on a Ray cluster, for `submit` and `status --ray-address`.

The driver is the supervisor of the job, as `up` is on one machine, with another `Backend`: a replica has a slot,
which is a placement group with one actor for each rank. The actor forks the rank from a preloaded process on its
node, so a restart on the same node is as fast as on one machine.

Read the modules in this order:

    submit      the commands: from inside the cluster, or through its Jobs API
    backend     `RayBackend`: which slot a replica starts in, and with which environment
    supervised  a supervisor for each replica
    slots       which replica or spare has which slot, and which are free
    slot        a slot: a placement group and its actors; it can be repaired in part
    placement   what a replica asks of a cluster, and what the cluster has; pure
    start_orders  environment, files and secrets with which its ranks start
    actor       `RankActor`: one rank at a time, on its node
    logs        copies what ranks write on their nodes to the run directory of the driver
    lighthouse  the lighthouse as a named actor that Ray restarts
    cluster     the connection to the cluster

A start: `RayBackend.start` -> `ReplicaSlots` -> `RankActor.start` -> `ForkServer.spawn` on the node.

Only this package, and `doctor.probe`, import Ray, and only the commands that need it import this package: Ray
is an optional dependency.
"""

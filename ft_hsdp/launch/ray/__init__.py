"""Ray: a job on a Ray cluster, for `submit` and `status --ray-address`.

The driver provides hosts, as many as the job wants: an actor on a node, which runs the agent of `launch.agent`.
The lighthouse says which ranks run where. The actor forks ranks from a preloaded process on its node,
so a restart on the same node is as fast as on one machine.

Read the modules in this order:

    submit      the commands: from inside the cluster, or through its Jobs API
    replicas    `RayReplicas`: what the lighthouse says of the job, and what the driver does then; `StatusActor`
    hosts       `RayHosts`: which hosts there are, and what takes the place of a lost or a cordoned one
    seats       the hosts that are wanted, and those there are; `Reservation`: a placement group, and its actors
    placement   what a replica asks of a cluster; pure
    actor       `HostActor`: the agent of a host, on its node
    logs        copies what ranks write on their nodes to the run directory of the driver
    cluster     the connection to the cluster

A start: `RayHosts.provide` -> `Reservation.actor` -> `HostActor.open` -> `HostAgent` -> (assigned) `LocalRanks`.

Only this package, and `doctor.probe`, import Ray, and only the commands that need it import this package: Ray
is an optional dependency.
"""

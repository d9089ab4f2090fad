"""Launching: starts, watches and restarts the processes of a job, and reports on it. Nothing here trains.

The lighthouse decides where replicas run and when they start again (`lighthouse.placement`). On each machine a
host agent makes that true: it starts and ends ranks, and reports how they ended. `host` is one agent, `replica`
one for one replica, and `up` runs the lighthouse and an agent for each host for which its machine stands. On a
Ray cluster `submit` still has a `ReplicaSupervisor` for each replica, which decides itself.

Read the modules in this order:

    cli, arguments      the command line: `launcher.py COMMAND ...`
    host                `host` and `replica`: the agent of one machine, which runs what it is assigned
    local               `up`: a job on this machine
    job                 one job from its first process to its last: what `up` and `submit` have in common
    backend             how ranks become processes: fork server, spares
    lighthouse_process  the lighthouses of a job, each started again on its port
    progress            how far the job is; tasks wait for its changes
    standalone          `lighthouse`, and what the processes have in common that are started one by one
    chaos, injection    injected failures: which one is due, and how it is injected
    admin, export       the operator's orders; a checkpoint as a Hugging Face model
    run                 the run's directory, and the commands that read it
    render, doctor      files for Slurm and Kubernetes; checks before the start
    ray                 `submit`: a job on a Ray cluster, with supervisors
    supervisor          one replica there: start, watch, restart; failures, replica_place, incarnation_watch and
                        lighthouse_link belong to it

The way of a restart: a rank exits -> `backend` -> `HeldRanks.exited` -> a report of `HostAgent` -> placement by
the lighthouse -> an answer with the next incarnation -> `LocalRanks.start`.

The agent of a job on CPUs loads no torch: it must start at once and stay small. The fork server, another process,
imports `train` by its name. No package of the product imports this one, except `bench`.
"""

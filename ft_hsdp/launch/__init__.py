"""Launching: starts, watches and restarts the processes of a job, and reports on it. Nothing here trains.

One process supervises a job: `up` on one machine, `submit` on a Ray cluster. It starts the lighthouse and one
`ReplicaSupervisor` for each replica. A supervisor starts all ranks of an incarnation through a `Backend`, ends
them together, and starts the next incarnation (FT-HSDP §4.2). It decides nothing about training: the lighthouse
does.

Read the modules in this order:

    cli, arguments      the command line: `launcher.py COMMAND ...`
    local               `up`: a job on this machine
    job                 one job from its first process to its last, on any backend
    supervisor          one replica: start, watch, restart
    incarnation_watch   what it learns of a running incarnation, and when it ends one that does not get on
    replica_place       where its ranks may run, and how many there are
    backend             how ranks become processes: fork server, spares
    ray                 the same on a Ray cluster
    lighthouse_process  the lighthouses of a job, each started again on its port
    lighthouse_link     a supervisor's reports to the lighthouse, and the orders in its answers
    progress            how far the job is; tasks wait for its changes
    standalone          `lighthouse`, and what the processes have in common that are started one by one
    host                `host` and `replica`: the agent of one machine, which runs what it is assigned
    chaos, injection    injected failures: which one is due, and how it is injected
    admin, export       the operator's orders; a checkpoint as a Hugging Face model
    run                 the run's directory, and the commands that read it
    render, doctor      files for Slurm and Kubernetes; checks before the start

The way of a restart: a rank exits -> `backend` -> `ReplicaProcess.exited` -> `ReplicaSupervisor` -> `core.restart`
-> `Backend.start` with a new incarnation.

The supervisor of a job on CPUs loads no torch: it must start at once and stay small. The fork server, another
process, imports `train` by its name. No package of the product imports this one, except `bench`.
"""

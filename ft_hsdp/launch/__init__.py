"""Launching: the processes of a job are started, watched, restarted and described; nothing here trains.

One process supervises a job: `up` on one machine, `submit` on a Ray cluster. It starts the lighthouse and one
`ReplicaSupervisor` for each replica. A supervisor starts all ranks of an incarnation through a `Backend`, ends
them together, and starts the next incarnation (FT-HSDP §4.2). It decides nothing about training: the lighthouse
does.

Read the modules in this order:

    cli, arguments      the command line: `launcher.py COMMAND ...`
    local               `up`: a job on this machine
    job                 one job from its first process to its last, on any backend
    supervisor          one replica: start, watch, restart
    backend             how ranks become processes: fork server, spares
    ray                 the same on a Ray cluster
    lighthouse_process  the lighthouses of a job, started again where they were
    lighthouse_link     reports to the lighthouse, and its orders to evict
    progress            how far the job is, for those who wait for it
    standalone          `lighthouse` and `replica`: the pieces one by one, or under torchrun
    chaos, injection    failures on purpose: which one is due, and how it is done
    admin, export       operator's commands; a checkpoint as a Hugging Face model
    run                 the run's directory, and everything that reads it
    render, doctor      files for Slurm and Kubernetes; checks before the start

The way of a restart: a rank exits -> `backend` -> `ReplicaProcess.exited` -> `ReplicaSupervisor` -> `core.restart`
-> `Backend.start` with a new incarnation.

The supervisor of a job on CPUs loads no torch: it must start at once and stay small. Ranks reach `train` by a
name in a string, in a process of their own. No package of the product imports this one, except `bench`.
"""

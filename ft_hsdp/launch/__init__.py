"""Launching: starts, watches and restarts the processes of a job, and reports on it. Nothing here trains.

The lighthouse decides where replicas run and when they start again (`lighthouse.placement`). On each machine a
host agent makes that true: it starts and ends ranks, and reports how they ended. `host` is one agent, `replica`
one for one replica; `up` runs the lighthouse and an agent for each host for which its machine stands, and `submit`
does so on a Ray cluster. Nothing here decides about failures or about training.

Read the modules in this order:

    cli, arguments      the command line: `launcher.py COMMAND ...`
    local               `up`: a job on this machine
    job                 one job from its first process to its last, on this machine or a cluster
    agent               the agent of a host, which runs what it is assigned
    host                `host` and `replica`: one machine of a job, with an agent
    burn_in             whether a machine computes and stores what it should, before it joins
    holder              starts that again when a signal has ended it; the ranks are its children
    backend             how ranks become processes: fork server, spares
    ray                 the same on a Ray cluster
    lighthouse_process  the lighthouses of a job, each started again on its port
    progress            how far the job is; tasks wait for its changes
    standalone          `lighthouse`, and what the processes have in common that are started one by one
    chaos, injection    injected failures: which one is due, and how it is injected
    admin, export       the operator's orders; a checkpoint as a Hugging Face model
    run                 the run's directory, and the commands that read it
    render, doctor      files for Slurm and Kubernetes; checks before the start
    sdc_check           whether this machine computes the same bits each time, and the same as others
    study               trains one job with many histories of failures, each in one process

The way of a restart: a rank exits -> `backend.children` -> `HeldRanks.exited` -> `HostAgent` reports ->
`lighthouse.placement` -> the answer -> `HostAgent` -> `LocalRanks.start` with a new incarnation.

This process of a job on CPUs loads no torch: it must start at once and stay small. The fork server, another
process, imports `train` by its name. No package of the product imports this one.
"""

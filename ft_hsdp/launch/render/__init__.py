"""Rendering: a job as one file for a scheduler that exists; `render` prints what Slurm or Kubernetes is given.

What is trained comes from the configuration, what belongs to the site from the command line. The file holds the
whole configuration, so what runs is what was rendered, and no secret. It is the same for the same input.

Read the modules in this order:

    command   `render TARGET CONFIG`: the options of each target
    settings  what the scheduler is asked for, and the configuration that the file carries
    slurm     an array of one element for each replica
    pod       what all pods of a rendered job share
    jobset    Kubernetes: a JobSet of one Job for each replica
    rayjob    KubeRay: a cluster for the job, and `submit` on it
    text      YAML with comments

The call path: `command` -> `settings` -> `slurm`, `jobset` or `rayjob` -> `text`. Nothing here starts a process or
opens a connection, so a file can be rendered on any machine.
"""

"""Renders a job as one file for Slurm or Kubernetes; `render` prints the file.

The configuration says what is trained; options of the command line say what the site needs. The file contains the
whole configuration, so a later change of the YAML file has no effect on it. It contains no secret, and the same
input always gives the same file.

Read the modules in this order:

    settings  what the scheduler is asked for, and the configuration that the file contains; YAML with comments
    slurm     an array with one element for each replica
    pod       the parts that all pods of a rendered job share
    jobset    Kubernetes: a JobSet of one Job for each replica
    rayjob    KubeRay: a cluster for the job, and `submit` on it

The call path: `launch.cli` -> `settings` -> `slurm`, `jobset` or `rayjob`. Nothing here starts a process or
opens a connection, so a file can be rendered on any machine.
"""

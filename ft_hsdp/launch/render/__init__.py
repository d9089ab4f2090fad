"""A job as one file for a scheduler that exists: `render` prints what Slurm or Kubernetes is given.

What is trained comes from the configuration, what belongs to the site from the command line. The file holds the
whole configuration, so what runs is what was rendered, and no secret. It is the same for the same input.
"""

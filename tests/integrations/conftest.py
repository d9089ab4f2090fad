"""Leaves out tests whose module needs a trainer that this environment does not have."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("pandas") else ["test_ray_train.py"]  # ray.train cannot be imported without it

"""A job on a Ray cluster: `submit`. Only this package imports Ray, and only these commands import this package."""

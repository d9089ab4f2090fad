"""Compat: places in others' systems that this package can take. Each imports its system, nothing else does."""

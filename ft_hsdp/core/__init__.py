"""The pure core: decisions without I/O and without a clock, stdlib only.

Each machine is ``transition(state, event) -> (state, effects)`` on frozen dataclasses, so that the same code
runs in production, in the model checker and in tests.
"""

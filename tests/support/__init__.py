"""What tests share: builders, stand-ins for real processes, and programs that tests start.

Tests import it as `from tests.support.ftar.ring_rig import Rig`. A folder is one subject; a module that several
subjects use is here. What runs in a process of its own is started with `python -m tests.support...`, or is named
`tests.support.launch.standin:main` where a job takes an entry point.

Commands for developers stay where documents name them: `tests/ftar/storm.py`, `benchmarks/beats.py`,
`tests/scenarios/pairs.py`, `tests/fuzz/fuzz.py`, `tests/golden/golden.py` and `tests/support/house.py`.
"""

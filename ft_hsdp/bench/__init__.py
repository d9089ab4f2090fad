"""Figures of the all-reduce beside its anchors, taken in one run. The command line is `launcher.py bench`."""

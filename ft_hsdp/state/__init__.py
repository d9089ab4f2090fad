"""Committed states: their layout, snapshots of them, and how a replica gets one from another (FT-HSDP §4.4)."""

"""FTAR: the fault-tolerant all-reduce between the ranks with one number in all replicas (FT-HSDP §4.2)."""

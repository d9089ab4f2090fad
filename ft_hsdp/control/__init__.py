"""Control: a leader, its ranks and the lighthouse (FT-HSDP §4.1)."""

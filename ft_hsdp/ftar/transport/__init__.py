"""Transports: how chunks get from one member of a ring to the next."""

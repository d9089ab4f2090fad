"""The quorum service: who is healthy, on which state, in which epoch. Imports no torch."""

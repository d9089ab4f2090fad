"""The real cores in a world of virtual messages: exhaustive exploration of the protocol."""

"""`bench fetch`: how fast a replica that is behind gets a state, beside bare sockets and torchft's transport."""

"""`bench strangers`: what hostile first frames at every listener of a job cost its steps."""

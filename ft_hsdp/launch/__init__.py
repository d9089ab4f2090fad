"""What starts, watches, disturbs and describes a job. The command line is in `cli`."""

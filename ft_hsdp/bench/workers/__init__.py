"""Processes of a bench that do one thing on command, over a socket.

- `link`: the bench's end of a worker's socket, and the process that forks workers;
- `nursery`: that process: it has imported everything, so that a worker starts at once;
- `worker`: a member of an all-reduce;
- `team`: all members of one contender, and mpirun's;
- `arena`: all teams of a bench, side by side;
- `fetch_worker`: a donor or receiver of a state.
"""

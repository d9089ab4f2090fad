"""Processes of a bench that do one thing on command, over a socket.

- `link`: both ends of a worker;
- `rings`: the workers of all contenders of `bench ftar`, forked, or started by mpirun;
- `worker`: a member of an all-reduce, and the process from which it is forked.
"""

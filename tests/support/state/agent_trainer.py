"""A rank (`python -m ... REPLICA RANK STEPS`) that writes some snapshots, half of one more, and stays."""

import sys

from tests.support.state.agent_helpers import connect, content, state, write


def main() -> None:
    replica, rank, last = map(int, sys.argv[1:])
    agent = connect(replica, rank)
    for step in range(1, last + 1):
        write(agent, step, rank, settle=step < last)
    array = agent.stage(state(last + 1))
    assert array is not None
    array[: len(array) // 2] = content(last + 1, rank)[: len(array) // 2]
    print("half", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()

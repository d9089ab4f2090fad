"""The model checker.

The production cores of a lighthouse and a few replicas, in every order of messages and failures.

A *world* is one state of all cores together with the messages between them. From the first world the explorer
visits every world that can be reached within `Bounds`, breadth first, and checks the safety properties at each
commit, fetch and word of the lighthouse. If one does not hold it prints the shortest way there. It also finds
worlds from which no end can be reached. docs/protocol.md says what the properties are, and what has been explored.

Read the modules in this order:

- `world`: `Bounds` (what may go wrong, how often) and `World`, a small tuple of ids of interned states.
- `view`: what can be seen of a world.
- `model`: how it changes when a core takes an event and its effects happen.
- `moves`: everything that may happen next in a world, each with a sentence.
- `invariants`: the safety properties. They look at the content of states, which no core knows.
- `explore`: the search, liveness, and the transcript of a violation.
- `copy_world`, `copy_model`, `copies`: another space for the same search: copies of the state in host memory, and
  hosts that are lost.

Gradients are replaced by their meaning: the content of a replica is the list of batches that it has applied, so
equality is exact. The package imports `ft_hsdp.core`, `ft_hsdp.memory`, the slots of a state agent and
`lighthouse.quorum`, the product's own code, and neither tensors nor sockets. Its users are the tests beside it,
the generator of the documentation and the command line.

Example: run the default space, or one with a link that breaks:

    python -m tests.model.explore
    explore(Bounds(replicas=2, deaths=1, breaks=1))
"""

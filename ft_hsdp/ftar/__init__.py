"""FTAR: the fault-tolerant all-reduce between the ranks with one number in all replicas (FT-HSDP §4.2).

Each rank of a replica is a member of one ring, or of several if some replica has fewer ranks than others. For each
epoch the members connect to their two neighbours, sum gradients round the ring, and leave it when a member fails
or the next epoch begins. A failed all-reduce leaves the input as it was, so that the caller can try again in a
later epoch.

An all-reduce goes this way:

    Group.all_reduce            any thread: puts a `Work` into the queue of its `LaneMember`
    Executor                    the engine's thread: waits for the ring of the work's epoch
    Ring.all_reduce             cuts the message into chunks and drives one `Exchange`
    Exchange -> Pipeline        `core.ring` says which chunk to copy, add, store or send next
    PlaneJob (dataplane)        copies and adds, on the CPU or on a GPU
    StreamReceiver, StreamSender (transport) move the chunks: TCP, shared memory or gloo

Read the modules in this order:

    communicator   the public API for callers without a control loop; the shortest complete use of the package
    settings       sizes, deadlines and transports of a group
    group          one rank's membership in the rings of successive epochs; everything else hangs on it
    lane           one of its rings, with the states that it passes through; several if replicas are unequally wide
    rendezvous     how the ring of one grant is formed, and which edges outlive their ring
    connections    accepts other members; the small control messages to them; one connected neighbour
    heartbeat      finds members that are dead or stuck
    executor       the engine's thread and its queue
    allreduce      one all-reduce on a ring; pieces: values that lie apart; frame: the header of a chunk
    transport, dataplane   packages of their own

The package imports ft_hsdp.core and ft_hsdp.protocol, and must not import train, state, control or launch: the
trainer drives a `Group` from its control loop, and other programs use the `Communicator` alone.

    communicator = Communicator(member=0, token=secret)
    communicator.reconfigure(1, [(0, communicator.address), (1, "10.0.0.2:4711")])
    total = communicator.all_reduce(gradient).wait()
"""

from ft_hsdp.ftar.communicator import Communicator
from ft_hsdp.ftar.executor import Work
from ft_hsdp.ftar.settings import Settings

__all__ = ["Communicator", "Settings", "Work"]

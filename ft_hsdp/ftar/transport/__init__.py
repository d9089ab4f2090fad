"""Transports: how chunks get from one member of a ring to its right neighbour.

An edge has two ends: the caller gets a `StreamSender`, the callee a `StreamReceiver`. Each edge may use another
transport. The payload of a chunk is never sent before its header, and the receiver checks each header against its
own plan before it touches memory, so a peer never tells it a size.

Read the modules in this order:

    base       what both ends know of an all-reduce, and of how payloads travel beside their headers
    arena      `Arena` registers memory, which a neighbour on the same host maps
    sender     frames over stream sockets: a window and a sending thread for each connection
    receiver   the other end: receiving threads for large chunks, the engine's thread for small ones
    kind       `TransportKind` makes the edges of one transport
    tcp        K connections between two hosts
    shm        neighbours on one host: the receiver reads the sender's memory in place
    gloo       payloads by torch.distributed (c10d), where gloo reaches a network that plain sockets do not

`rendezvous.choose` picks the transport of an edge from what both ends offer. The package imports the rest of ftar
only for frames, connections and settings; it knows nothing of rings, epochs and groups.

    sender = await KINDS["tcp"].dial(edge, arena)      # at the caller
    receiver = await KINDS["tcp"].accept(edge, calls)  # at the callee
"""

"""The transfer of a state between replicas: a rank that is behind fetches its shard from others (FT-HSDP §4.4).

A state server runs in the state agent of each host. It serves the packed bytes of a shard and their manifest
over HTTP. A rank that is behind asks the servers of the same rank in all healthy replicas, demands that a
majority of their manifests have one digest, and fetches the chunks from all of these at once. Each chunk is
compared with its checksum before the state is used.

Read the modules in this order:

- `shard_manifest`: where each tensor lies in a packed shard (`Layout`); manifests: encoding and checks.
- `http`: `StateServer`: on threads of its own, by sendfile, with limits against slow and malicious readers.
- `donor_connection`: `DonorConnection`: the reader's end of one connection; `ask_held`: what many agents have.
- `striping`: what the threads of a fetch share: the vote on the manifest, and the chunks that are still to come.
- `fetch`: `fetch`: asks the donors, receives from all at once, verifies.
- `parts`: what one rank has for a rank of another width, as a stream of its own; `ServedParts`: the donor's end.
- `reshape`: `fetch_shard`: fetches a shard from replicas of any width, put together from parts if need be.
- `blocks`: slices of a user's static data, and how parts of many of them are fetched.

A fetch goes this way:

    fetch -> DonorConnection.ask -> StateServer -> SnapshotSource.borrow -> sendfile -> DonorConnection.read_into

Connections prove the job's token (`ft_hsdp.handshake`) and are encrypted between hosts
(`ft_hsdp.record_layer`). This package must not import torch, because the state agent uses it.

Example: fetch a shard that this rank's own model describes:

    expected = ExpectedShard(state, rank, ranks, layout.fingerprint, layout.nbytes)
    request = FetchRequest.exactly(expected, memory)
    shard = fetch(donors, request, token, deadline_s=30.0, cancel=threading.Event(), rejected=report)
"""

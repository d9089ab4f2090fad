"""The lighthouse: the service that decides which replicas train together, from which state, in which epoch.

One lighthouse serves one job (the word is torchft's). Replicas ask it for each step, supervisors and the agents of
hosts report what runs, operators give orders, and the page shows what happens. Nothing here imports torch, so a
lighthouse starts fast and runs on a small machine.

The path of a request for a step:

    http/connections -> http/access -> http/quorum_route -> validation -> service
        -> placement.machine -> quorum.transition -> store -> the answer

Every decision is made by `quorum`, written to `store`, and only then told. So a lighthouse that is killed at any
moment and started again continues the same epoch, with a higher term. While it is away, a membership that works
goes on under its lease.

Read in this order:

- `quorum`: the decisions, pure. Start here.
- `placement`: on which hosts the replicas run, pure; it has each event after the quorum.
- `service`: one job; every event goes through `Service.apply`; `Evictions`: the orders to kill silent members.
- `validation`: what a message may claim at all.
- `store`: what must survive the lighthouse, in SQLite.
- `http`: connections, tokens, limits and routes.
- `journal`: every event and commit, kept and streamed; nothing is decided from it.
- `overview`: what the page shows, folded from the journal, pure.
- `status`: one word per replica.
- `runtime`: what a lighthouse builds while it leads.
- `ha`: several lighthouses, of which one leads (etcd).
- `__main__`: the process.

`quorum`, `placement` and `overview` must not do I/O or import a library. Of `ft_hsdp`, nothing here may
import what runs beside or above a lighthouse: `ftar`, `state`, `control`, `train`, `launch` (import-linter checks
both).

Example: ``python -m lighthouse --run runs/job`` serves the job whose configuration is runs/job/config.yaml.
"""

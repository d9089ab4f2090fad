"""Several lighthouses of one job, of which one leads (``lighthouse.etcd``).

Each of them is a process with a port of its own. One key in etcd, put under an etcd lease, names the leader. The
revision in which the key was made is the leader's fence: a later leader has a larger one, and every write of the
durable state is a transaction that etcd accepts only while the key still has that revision. So a leader that was
paused can write nothing any more. The leader counts on its lease only for as long as its own clock says, from
before it asked for it, so it stops before another one can begin.

A lighthouse that does not lead answers 503 with the leader's URL, and copies the leader's journal, so that the
job's history survives the loss of the leader's machine. A leader that loses the lead ends, and starts over as a
fresh program: nothing that it remembers can be told any more.

Read in this order:

- `instance`: which of the lighthouses of a run directory this process is, and where the others listen.
- `etcd`: the few calls of etcd's JSON gateway.
- `election`: winning and keeping the lead; `EtcdStore`, the durable state in etcd.
- `replication`: the copy of the leader's journal.
- `candidate`: all of it together, from standing by to losing the lead; what a lighthouse serves that does not
  lead.

A lighthouse that is alone imports only `instance`, so that it starts fast. Nothing here decides about replicas:
that is `lighthouse.quorum`, the same code for one lighthouse and for several.

The main path: `Candidate.begin` -> `Election.win` -> ``begin(EtcdStore, ...)`` -> `SwitchableApp.lead` ->
`Election.keep` -> deposed -> the process starts over.
"""

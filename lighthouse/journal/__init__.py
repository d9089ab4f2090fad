"""The journal of a job: every event and commit that the lighthouse hears of or makes, numbered and stored.

Replicas and supervisors send telemetry beside the protocol (`POST /v1/telemetry`). The journal checks it, gives
each row one number, stores it in SQLite, folds it into the overview (`lighthouse.overview`), and passes it on to
the page and to curves. The lighthouse decides nothing from telemetry, so a worker that lies in it draws a wrong
curve; but with `quorum.on_culprit: evict` two replicas that lie together may have a third one started again.

Read in this order:

- `journal`: `JobJournal`, the way of a row from telemetry to everything below;
- `row_checks`: which rows are accepted from whom, cut to size (pure);
- `database`: the SQLite file, and the one in memory for the pages of finished runs;
- `subscribers`: the stream of rows to pages and to standby lighthouses;
- `exporters`: curves for TensorBoard and Weights & Biases, each on a thread of its own;
- `alerts`: messages to people, by webhooks and programs.

Durability: `JobJournal.note` stores the lighthouse's own events before it returns, because a decision is answered
only after it is recorded. Rows of workers are stored within `FLUSH_S`; a crash loses no more than those, and the
files of each replica still have them.

The package does not import `lighthouse.quorum` or the service, so that no decision can come to depend on a row,
nor the launcher, which imports this package to show finished runs.

Example:
    journal = JobJournal(MemoryDatabase(), JobInfo("job", slots=4, ranks=2, steps=1000))
    journal.take(telemetry)        # from a worker: raises ProtocolViolation, or takes all of it
    journal.overview(points=600)   # what the page shows
"""

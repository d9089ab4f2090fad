"""The overview of a job: rows of its journal, folded one at a time into what the page and `/metrics` show.

`Overview.add` takes each row in amortized constant time, `Overview.show` returns the answer to `GET /v1/overview`.
Memory does not grow with the length of the job: each part keeps a bounded number of records. The failures and the
effective training time come from `ft_hsdp.analysis`, which summary.json and `explain` use too; here are the parts
that only the page needs.

Read in this order:

- `overview`: a row of the journal (`JournalEntry`), what does not change about a job (`JobInfo`), `Overview`, and
  `Protection`: whether a lost host can take the only copy of a shard with it;
- `replicas`: the lane of each replica, that is which state it was in when;
- `series`: curves of commits, and of the values of users' loops, thinned out to what a page can draw;
- `liveness`: stragglers and stalled replicas, found while the job runs, and what its ranks told last;
- `suspects`: which rank keeps the job waiting;
- `machines`: what ranks measure of themselves and their hosts, and hosts whose clocks are wrong;
- `alarms`: what needs people.

The package is pure: no library, no file, no clock; the time comes in as an argument (an import contract in
pyproject.toml holds this). So the page of a finished run, and the page at an earlier time, are the same fold over
fewer rows. Rows may come a second late and out of order, because hosts send them on their own; a row that a later
contribution has disproved is ignored.

Example:
    overview = Overview(JobInfo("job", slots=4, ranks=2, steps=1000))
    for entry in database.read(after=0, limit=1000):
        overview.add(entry)
    answer = overview.show(now, start=None, end=None, points=600)
"""

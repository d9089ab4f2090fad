"""A run: its directory, and the commands that read the logs in it.

Each process of a job appends to its own files. The supervisor merges them while the job runs (`recorder`). All
other modules read them, most of them after the end of the run.

Read the modules in this order:

    directory  the names of the files, finding a run, atomic writes, and readers of logs that still grow
    recorder   merges all logs into events.jsonl, metrics.jsonl and summary.json
    follow     does that beside a lighthouse that was started by itself
    grants     the grants that the lighthouses of the run logged
    summary    summary.json: the job in figures; `explain`: a run in words
    audit      which units were trained once, twice, or never
    verify     `verify`: checks that the logs are a history that the protocol allows
    replay     `replay`: the ranks of one replica train the committed steps again, and every bit is compared
    locate     `locate`: which rank, host and process held an element of a parameter
    goodput    `goodput`: the effective training time, predicted and measured
    trace      `trace`: a file for ui.perfetto.dev
    page       `replay --page`: the lighthouse's page for a finished run
    status     `status`: the state of a running job
    diagnose   `diagnose`: who keeps a running job waiting
    terminal   what `up` shows while it runs

Example: `verify.verify(RunDir(path))` reads a run and returns what breaks a promise.

Readers take rows one at a time, so that memory does not grow with the run. Events are analysed in
`ft_hsdp.analysis`, which is pure; this package adds files and words. Only `replay`, which trains, may import
`train`.
"""

"""A run: its directory, and everything that is made of the logs in it.

Each process of a job appends to files of its own. The supervisor merges them while the job runs (`recorder`); all
other modules read them, mostly when the run is over.

Read the modules in this order:

    directory  the names of the files, atomic writes, and readers of logs that still grow
    recorder   merges all logs into events.jsonl, metrics.jsonl and summary.json
    history    the commits of all replicas as one history
    grants     the grants that the lighthouses of the run have noted
    summary    summary.json: the job in figures
    explain    `explain`: a run in words
    audit      which batches were trained, twice, or never
    verify     `verify`: whether the logs are a history that the protocol allows
    replay     `replay`: one process trains the same again, and compares every bit
    trace      `trace`: a file for ui.perfetto.dev
    page       `page`: the lighthouse's page for a run that is over
    status     `status`: what a job does at the moment
    terminal   what `up` shows while it runs

Example: `verify.verify(RunDir(path))` reads a run and returns what breaks a promise.

Readers take rows one at a time, so that memory does not grow with the run. Events are analysed in
`ft_hsdp.analysis`, which is pure; this package adds files and words. Only `replay`, which trains, may import
`train`.
"""

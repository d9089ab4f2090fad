"""A replay inside a rank: the loop runs again on the recorded steps of a finished run.

`launcher.py replay` starts the ranks of one replica for each width that the replicas of the run had,
with no lighthouse and no ring (ADR 30). `ft_hsdp.join` returns a `ReplayJob` there. The loop, the optimizer and
`StepDriver` are those of a run; only the orders come from the recorded commits.

Read the modules in this order:

    job    `ReplayJob`, and `RecordedOrders`, which stands in for the leader
    planned  `VariantJob`: steps with made-up failures, for `study`
    trial  `TrialJob`: the steps of a replica that is alone, for `sdc-check`
    lanes  the sums: in the order of the recorded rings, and with ranks of other widths through files

The way of a recorded step: ``RecordedOrders`` has the loop train the units of one contributor after the other;
`LocalGradients` keeps what was trained for each; `ring_sum`, or `SharedLanes` for replicas of unequal width, adds
it up; and if the record with the new sums leads to the recorded lineage, it becomes an `ApplyOrder`.

This package may not import `launch`, which starts the ranks (`launch.run.replay`).
"""

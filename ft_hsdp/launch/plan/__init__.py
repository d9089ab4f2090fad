"""`plan`: which hosts hold which shards, how likely a loss of the state is, and what copies in memory cost.

Nothing is started and no host is asked: all figures are computed from the configuration, and from what it does not
say, which is assumed. Each assumption is an option, and is printed beside the figures.

    estimate  the document of `plan --json`: hosts, shards, and the figures with copies and without
    width     its part about fewer ranks (`memory.shrink_to`), beside the wait for another host
    table     the same document as text for people

The figures are those of the papers, computed by pure functions: placement of copies by GEMINI's Algorithm 1
(`memory.copies`), survival of lost hosts and expected losses (`analysis.reliability`), wasted time by GEMINI's
equation 1 and the cost of a failure by DeadPool's model (`analysis.costs`). Both sides of the table are of the
same job: one with the copies that the configuration asks for, one with the replicas alone.

`doctor` uses the document to compare the memory of a host with what copies need there. Hosts are named as `up`
names emulated ones: r0h1 is host 1 of replica 0, s0 a spare one.
"""

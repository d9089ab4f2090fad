"""Figures of runs: what events and commits mean, and what copies of the state are worth.

Replicas, supervisors and the lighthouse write three kinds of rows. An event says that something happened, a commit
that a step was decided; logged values come from a user's loop. Everything that is said about a run afterwards is
computed here, from these rows, once: the lighthouse's page, summary.json, `explain`, `trace`, the page of `replay`
and `bench return` show the same figures because they call the same code (docs/adr/0018).

Read in this order:

- `commits`: which of the commits that replicas logged are in the history that lasted; the values of a user's loop;
- `incarnations`: when each stage of a replica's start was over;
- `failures`: which incarnations failed, who noticed when, and how the replica came back;
- `goodput`: how much of the time trained the model, and where the rest went;
- `culprits`: who keeps a job waiting, from what its ranks tell of their collectives; `diagnosis`: the document;
- `locate`: which rank and host held an element of a parameter at a step;
- `outliers`: which ranks and hosts compute otherwise than most of them (`sdc-check`);
- `studies`: histories of failures, and what training under them has come to (`study`).

Before a run, `launcher.py plan` computes from a configuration what copies of the state will be worth:

- `survival`: the exact probability that k lost hosts take no state with them (ReStore §IV-D);
- `costs`: wasted time and effective training time by the papers' models, and what is assumed;
- `plan`, `fewer_ranks`, `plan_table`: both for the hosts of one job; its part on narrow replicas, and its text;
- `job_model`: a whole job as a model of events, of which the papers' systems are settings;
- `prediction`: these settings, from systems.json or from a run, and published rates of failures (`goodput`).

All of it is pure: rows come in, figures go out. It imports no library, no file, no clock, and of this product only
`ft_hsdp.core` and `ft_hsdp.memory`. So the launcher can use it, and the lighthouse, which imports neither the
launcher nor torch (the import contracts in pyproject.toml hold this). Rows may come late and out of order: each
fold keeps facts as they come and computes a figure when it is asked for. Memory does not grow with the length of a
run, except where a caller asks for all failures.

Example:
    failures = Failures(slots=4)
    for seq, row in enumerate(rows, 1):
        if "event" in row:
            failures.event(seq, row["event"], row)
        else:
            failures.commit(row["t"], row["epoch"], row["contributors"])
    told = [failures.account(failure, typical=1.2) for failure in failures.losses()]
"""

"""Who is in the quorum? The pure decision of the lighthouse.

The package is one function, `transition.transition(state, event) -> (state, effects)`. The state is all that the
lighthouse knows: each replica's newest incarnation and open request, the exits that supervisors reported, the
current grant and earlier epochs. Events are requests, withdrawn requests, supervisors' reports, operators'
commands and the passing of time. Effects are replies, orders to kill and journal lines. `lighthouse.service`
stores the new state first and carries the effects out afterwards.

A membership that works is left alone: the first request for a step settles the grant for that step, and all other
members get `Continue` at once. At that moment the grant may change without a pause: newcomers join, exited members
drop out, members that caught up contribute. A round is needed only before the first epoch, after a member reports
that the ring broke, or when all members have exited. A round waits for every member that may live, leaves out
those that stay silent beyond a grace, and grants an epoch on the highest state reported. Silence is never taken
for death: no epoch is granted while an absent member that may live could hold a newer committed state.

Fences stop old processes. A later incarnation of a replica fences every earlier one, and each grant lists the
attempts that can never commit (`voids`), so that no replica applies their records.

Read in this order. No module does I/O, reads a clock, draws a random number or imports a library (import-linter
checks that), so the model checker `tests.model` explores this very code.

- `rules`: the decision on reports alone: the highest state, who contributes, which members cannot connect.
- `units`: how many units each member trains, and where.
- `state`: what is known, changes that decisions share, `holders`. `events`: events and effects.
- `witnesses`: whose word counts. `transition`: one event in, one decision out; which incarnation counts.
- `membership`: the next membership, settled on a ring that works or by a round; the end of training.
- `commands`: what an operator can order.

Example:
    >>> from ft_hsdp.core.grant import Report
    >>> from ft_hsdp.core.state_id import initial
    >>> from lighthouse.quorum import events, state, transition
    >>> start, s = initial("config", "weights"), state.LighthouseState.empty(state.Policy(2, steps=100), term=1)
    >>> for r in 0, 1:
    ...     request = events.OpenRequest(Report(r, f"{r}-run-0", start, step=1), id=r)
    ...     s, effects = transition.transition(s, events.Asked(request, now=0.0))
    ...     print([e.reason if isinstance(e, events.Note) else e.replica for e in effects])
    ['waiting for replica 1']
    ['first epoch; replicas 0,1 contribute on (0, 0, 1b62bc8d)', 0, 1]
"""

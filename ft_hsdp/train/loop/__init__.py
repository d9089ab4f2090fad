"""What a user's training loop hears of its job, and tells it, beside the batches and the steps.

A replica that is behind applies committed steps that its loop never sees, and one that comes back begins with a
state that another replica has made. So a loop that counts its own steps, or keeps its own averages, would differ
from replica to replica. Here is what is the same on all of them.

Read in this order:

- `callbacks`: functions of the user that are called with each committed step, with a state that was fetched or
  loaded, and at the end. Those on a commit are a part of applying the step;
- `user_state`: state of the user that is part of the committed state. It changes in callbacks on a commit;
- `user_loop`: the part of `Job` with all of these; numbers of the loop for the metrics, and which replica's count;
  pauses, which are announced so that nobody takes them for a hang;
- `evaluation`: the loss of committed states on other data, which each replica computes by itself.

The way of a committed step: ``StepDriver._apply`` makes a `CommittedStep` of the record, and `LiveState.apply`
calls ``Callbacks.call`` between the update of the weights and the state's new name. An error there ends the
rank.

Example:
    @job.on_commit
    def note(step):
        job.log({"gradient_norm": step.gradient_norm})
"""

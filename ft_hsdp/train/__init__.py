"""The trainer: data, model, FSDP2 hooks, optimizer, and the job that joins them."""

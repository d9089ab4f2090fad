"""A job that trains all its steps and ends by itself, with signals to its ranks on the way."""

from __future__ import annotations

import time

from benchmarks.jobs import PATIENCE_S, TICK_S, JobUnderTest
from ft_hsdp.errors import Retryable
from ft_hsdp.launch.backend.processes import last_line
from ft_hsdp.launch.run.directory import Row, read_json


class WholeJob(JobUnderTest):
    """A job of this product whose end is awaited, for its summary."""

    def finish(self) -> Row:
        """Wait until the job has trained all its steps and has ended; return its summary.

        Raises:
            Retryable: The job fails, or commits nothing for `PATIENCE_S`.
        """
        ((_, process, log),) = self._processes()
        deadline, seen = time.monotonic() + PATIENCE_S, 0
        while process.poll() is None:
            self.read()
            if (count := sum(map(len, self.rows.values()))) > seen:
                deadline, seen = time.monotonic() + PATIENCE_S, count
            if time.monotonic() > deadline:
                raise Retryable(f"bench: the job commits nothing for {PATIENCE_S:g} s: {last_line(log)}")
            time.sleep(TICK_S)
        self._end(process)
        if process.returncode != 0:
            raise Retryable(f"bench: the job ended with {process.returncode}: {last_line(log)}")
        return Row(read_json(self.run.summary))

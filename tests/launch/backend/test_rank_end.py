import errno
import os

import pytest

from ft_hsdp.core.restart import Cause
from ft_hsdp.errors import Retryable
from ft_hsdp.launch.backend.processes import last_line
from ft_hsdp.launch.backend.rank_end import RankEnd, cause_of, tell, told
from ft_hsdp.launch.run.directory import RunDir


class EndpointConnectionError(Exception):
    """As clients of object stores have them: no OSError."""


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (KeyError("tokens"), Cause.SCRIPT),
        (ValueError("fully_shard doesn't support scalar parameters"), Cause.SCRIPT),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (16x2 and 3x8)"), Cause.SCRIPT),
        (FileNotFoundError(errno.ENOENT, "No such file", "/data/part"), Cause.TEMPORARY),
        (caused(ValueError("no data"), ConnectionResetError()), Cause.TEMPORARY),
        (EndpointConnectionError("s3"), Cause.TEMPORARY),
        (RuntimeError("Connection closed by peer [127.0.0.1]:1234"), Cause.TEMPORARY),
        (TimeoutError(), Cause.TEMPORARY),
        (Retryable("no state agent"), Cause.TEMPORARY),
        (RuntimeError("CUDA error: device-side assert triggered"), Cause.DEVICE),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Segmentation fault."), Cause.DEVICE),
        (OSError(errno.EMFILE, "Too many open files"), Cause.SHORTAGE),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), Cause.SHORTAGE),
        (OSError(errno.ENOSPC, "No space left on device"), Cause.SHORTAGE),
        (MemoryError(), Cause.SHORTAGE),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), Cause.SHORTAGE),
        (RuntimeError("failed to listen: EADDRINUSE, address already in use"), Cause.SHORTAGE),
        (RuntimeError("can't start new thread"), Cause.SHORTAGE),
    ],
)
def test_what_is_to_blame_for_an_error(error: Exception, cause: Cause) -> None:
    assert cause_of(error) is cause


def test_an_end_is_heard_of_by_its_own_incarnation_alone(run_dir: RunDir) -> None:
    tell(run_dir.path, 1, 0, "1-a-0", ValueError("x\ny \x1b[2J\x07\x9b\u202e."))
    assert told(run_dir, 1, 0, "1-a-0") == RankEnd(Cause.SCRIPT, "ValueError: x y [2J .")
    run_dir.rank_log(1, 0).write_text("first\n\x1b]0;title\x07 \x9b31m last\n\n")
    assert last_line(run_dir.rank_log(1, 0)) == "]0;title 31m last"
    assert told(run_dir, 1, 0, "1-a-1") is None, "the next one has said nothing"
    os.truncate(run_dir.rank_end(1, 0), 7)
    assert told(run_dir, 1, 0, "1-a-0") is None, "half a file"

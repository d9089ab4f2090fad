import fcntl
import os
import signal
import subprocess
import sys

import pytest

from ft_hsdp.state import shared_memory


def test_all_pages_are_there_from_the_start():
    fd = shared_memory.create(1 << 20)
    assert os.fstat(fd).st_blocks * 512 >= 1 << 20
    os.close(fd)


def test_nobody_can_shrink_it_under_a_reader():
    fd = shared_memory.create(8192)
    for size in (0, 4096, 16384):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.close(fd)


def test_only_sealed_and_large_enough_ones_are_mapped():
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 8192)
    with pytest.raises(ValueError, match="not sealed"):
        shared_memory.attach(fd, 8192, writable=True)
    os.close(fd)
    fd = shared_memory.create(100)
    with pytest.raises(ValueError, match="100 bytes, wanted 101"):
        shared_memory.attach(fd, 101, writable=True)
    os.close(fd)


def test_a_segment_that_cannot_be_made_costs_an_exception_and_no_descriptor():
    script = """
import os, resource
from ft_hsdp.state import shared_memory
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
before = len(os.listdir("/proc/self/fd"))
try:
    shared_memory.create(2 << 20)
except OSError as error:
    print(error.strerror)
assert len(os.listdir("/proc/self/fd")) == before
shared_memory.attach(shared_memory.create(1 << 20), 1 << 20, writable=True)[-1] = 1
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "File too large\n", "")


def test_who_writes_into_what_is_protected_ends_and_the_bytes_stay():
    fd = shared_memory.create(10_000)
    array = shared_memory.attach(fd, 10_000, writable=True)
    array[:] = 7
    shared_memory.protect(array, writable=False)
    script = f"""
import numpy as np
from ft_hsdp.state import shared_memory
array = shared_memory.attach({fd}, 10_000, writable=True)
shared_memory.protect(array, writable=False)
shared_memory.protect(array, writable=True)
array[1] = 8
shared_memory.protect(array, writable=False)
array[2] = 9
"""
    done = subprocess.run([sys.executable, "-c", script], pass_fds=(fd,), check=False)
    assert done.returncode == -signal.SIGSEGV
    assert array[:4].tolist() == [7, 8, 7, 7]
    shared_memory.protect(array, writable=True)
    array[:] = 1
    os.close(fd)
    shared_memory.protect(array[:0], writable=False)

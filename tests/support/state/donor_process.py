"""A donor in a process of its own: `... SIZE CHUNK KILL_AT` serves `state_helpers.sealed(SIZE)`.

It prints its address. With KILL_AT > 0 it kills itself, without a word, once it has sent that many bytes of data.
"""

import os
import signal
import sys

from ft_hsdp.state.shared_memory import InMemorySnapshots
from ft_hsdp.state.transfer import http, shard_manifest
from tests.support.state.state_helpers import TOKEN, sealed

size, shard_manifest.CHUNK_BYTES, kill_at = (int(word) for word in sys.argv[1:4])
sent = 0
sendfile = os.sendfile


def counted(out: int, fd: int, offset: int, count: int) -> int:
    global sent
    sent += (n := sendfile(out, fd, offset, min(count, kill_at - sent) if kill_at else count))
    if kill_at and sent >= kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
    return n


http.os.sendfile = counted
snapshot, _ = sealed(size=size)
source = InMemorySnapshots()
source.put(snapshot.manifest, snapshot.room)
served = http.StateServer("127.0.0.1", 0, source, TOKEN)
print(served.address, flush=True)
sys.stdin.read()
served.close()

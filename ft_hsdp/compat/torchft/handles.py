"""The members of one ``reconfigure``: the handles by which c10d and torchft's nightly name them.

A handle is the JSON of an identity and an address: of the group, and of the store that the group serves. The order
of the handles is the order of the ranks, and the store of the first one is where they meet. The names of the keys
are torchft's, because its wrappers of process groups read them; ``count`` is ours:

    {"id": "5f0c...", "store": "10.0.0.7:41231", "global_rank": 3, "count": 2}

`membership` reads the handles of one call, which came from other processes through torchft's lighthouse. It checks
all of them before the group changes anything. The name of a membership covers the uuid and every handle. ``count``
grows with each ``reconfigure`` of a group: new handles never make an old name, also after a restart of the
lighthouse, which then hands out its first uuids again.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Set
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, Protocol
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch.distributed import TCPStore

from ft_hsdp import address
from ft_hsdp.errors import InvalidArgument

KEYS = "ftar/"  # of all memberships in a store that a group serves
GAVE_UP = "over"  # the key of a membership that says why a rank could not go on
MAX_HANDLE = 1024  # characters; the longest name of a host has 253
MAX_MEMBERS = 4096
KIND = "handles of ProcessGroupFTAR, from get_reconfigure_handle"


class ReconfigureOptions(Protocol):
    """What `ProcessGroupFTAR.reconfigure` reads; both c10d's class of this name and torchft's have it."""

    uuid: int  # never used before with the same handles
    handles: Any  # a list of str
    timeout: timedelta | None


class _Handle(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    id: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    store: Annotated[str, Field(max_length=300)]
    global_rank: Annotated[int, Field(ge=0, lt=2**32)] | None
    count: Annotated[int, Field(ge=0, lt=2**53)]


@dataclass(frozen=True, slots=True)
class Membership:
    """The ranks of one ``reconfigure``, as seen by one of them."""

    name: str  # the same at all ranks; no other membership has it
    rank: int
    size: int
    store: str  # "host:port" that the first rank serves
    own: str  # "host:port" in this rank's handle


class ServedStore:
    """A store of torch that this process serves as long as the object lives.

    Others reach it at the address ``host``. It is not protected, as none of torch's is: a process that reaches it
    can join a membership.

    Raises:
        RuntimeError: No port is free.
    """

    def __init__(self, host: str) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # listens on all addresses
        self.address = address.join(host, self._store.port)

    def forget(self, names: Set[str]) -> None:
        """Delete what the ranks of these memberships wrote, all but why one gave up: whoever is late reads that.

        Gloo alone writes some KiB for each rank. A torch whose stores cannot list their keys keeps all.
        """
        if not hasattr(self._store, "list_keys"):
            return
        for key in self._store.list_keys():
            root, _, rest = key.removeprefix(KEYS).partition("/")
            if key.startswith(KEYS) and root in names and rest != GAVE_UP:
                self._store.delete_key(key)


def encode(identity: str, store: str, global_rank: int | None, count: int) -> str:
    """Return the handle of a group.

    Args:
        identity: 32 hexadecimal digits that no other group has.
        store: "host:port" of the store that the group serves.
        global_rank: Of the process, if torchft said it. Not used.
        count: How often the group was reconfigured.
    """
    return json.dumps({"id": identity, "store": store, "global_rank": global_rank, "count": count})


def membership(options: ReconfigureOptions, identity: str) -> Membership:
    """Return the ranks that ``options`` name, seen by the group ``identity``.

    Raises:
        InvalidArgument: The options or a handle are malformed, a handle is there twice, or the group's own is not
            there.
    """
    uuid, texts = options.uuid, options.handles
    if type(uuid) is not int or not -(2**63) <= uuid < 2**64:
        raise InvalidArgument(f"uuid: got {str(uuid)[:60]!r}; allowed: a number of 64 bits")
    if not isinstance(texts, list) or not 1 <= len(texts) <= MAX_MEMBERS:
        got = f"{len(texts)} handles" if isinstance(texts, list) else f"a {type(texts).__name__}"
        raise InvalidArgument(f"handles: got {got}; allowed: a list of 1 to {MAX_MEMBERS}, ordered by rank")
    handles = [_decoded(rank, text) for rank, text in enumerate(texts)]
    names = [handle.id for handle in handles]
    if len(set(names)) != len(names):
        raise InvalidArgument(f"handles: got one group twice among {len(names)}; allowed: each group once")
    if identity not in names:
        raise InvalidArgument(f"handles: got {len(names)} without this group's own; allowed: it is one of them")
    rank = names.index(identity)
    name = hashlib.sha256(json.dumps([uuid, texts]).encode()).hexdigest()[:32]
    return Membership(name, rank, len(handles), handles[0].store, handles[rank].store)


def _decoded(rank: int, text: object) -> _Handle:
    if not isinstance(text, str) or len(text) > MAX_HANDLE:
        got = f"{len(text)} characters" if isinstance(text, str) else f"a {type(text).__name__}"
        raise InvalidArgument(f"handle of rank {rank}: got {got}; allowed: {KIND}")
    try:
        handle = _Handle.model_validate_json(text)
        _, port = address.split(handle.store)
    except (ValidationError, ValueError):
        port = 0
    if not port:
        raise InvalidArgument(f"handle of rank {rank}: got {text[:80]!r}; allowed: {KIND}")
    return handle


def own_host() -> str:
    """Return the IPv4 address of this host that TORCHFT_LIGHTHOUSE leads to, or else that of the host's name.

    Raises:
        OSError: The name of the lighthouse or of this host is not known.
    """
    lighthouse = urlsplit(os.environ.get("TORCHFT_LIGHTHOUSE", ""))
    if lighthouse.hostname:
        return address.source(lighthouse.hostname, lighthouse.port or 0, socket.AF_INET)
    return socket.gethostbyname(socket.gethostname())

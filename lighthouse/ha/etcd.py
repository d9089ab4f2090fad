"""The few calls of etcd's v3 JSON gateway that electing a leader and keeping its state need.

Keys and values are text; on the wire they are base64. Every call may be repeated: it takes effect once. An answer
that is not what etcd says to such a call (of a proxy, or cut short) counts as none.
"""

from __future__ import annotations

import base64
import math
import os
import threading
import time
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from ft_hsdp.errors import ConfigError, Retryable

USER_VARIABLE = "FT_HSDP_ETCD_USER"
PASSWORD_VARIABLE = "FT_HSDP_ETCD_PASSWORD"  # noqa: S105 - the name of a variable
LEAST_S = 0.1  # for one endpoint, however late it is
_UNAVAILABLE = {"1", "4", "14"}  # gRPC: cancelled, deadline exceeded, unavailable; another member may do it
_UNAUTHENTICATED = "16"

T = TypeVar("T")


def prefix(job: str) -> str:
    """Return how the keys of the jobs of a name begin."""
    return f"/ft_hsdp/{job}"


class EtcdUnreachable(Retryable):
    """No endpoint gave an answer of etcd in time: whether the call took effect is not known."""


class EtcdRefused(Retryable):
    """Etcd answered that it does not carry out the call."""


@dataclass(frozen=True, slots=True)
class EtcdEntry:
    value: str
    create_revision: int  # of the whole store
    version: int  # how often it was put since it was created


class Etcd:
    """A client of one cluster. Thread-safe. All calls block.

    Args:
        endpoints: URLs. An https endpoint must have a certificate that this machine trusts.
        timeout_s: A call takes at most about this long, over all endpoints.
        user: For a cluster that wants a login; "": none.
    """

    def __init__(self, endpoints: tuple[str, ...], timeout_s: float, user: str = "", password: str = "") -> None:
        self._endpoints = tuple(endpoint.rstrip("/") for endpoint in endpoints)
        self._timeout_s = timeout_s
        self._login = {"name": user, "password": password} if user else None
        self._token = ""
        self._first = 0
        self._lock = threading.Lock()
        self._http = httpx.Client(trust_env=False, follow_redirects=False)

    @staticmethod
    def with_secrets(endpoints: tuple[str, ...], timeout_s: float) -> Etcd:
        """Return a client with the user and password of the environment, if they are there.

        Raises:
            ConfigError: an endpoint is no URL.
        """
        for endpoint in endpoints:
            if not endpoint.startswith(("http://", "https://")):
                raise ConfigError("lighthouse.etcd", endpoint, "http://HOST:PORT or https://HOST:PORT")
        user, password = os.environ.get(USER_VARIABLE, ""), os.environ.get(PASSWORD_VARIABLE, "")
        return Etcd(endpoints, timeout_s, user, password)

    # Leases.

    def grant(self, ttl_s: int) -> tuple[int, float]:
        """Return a new lease: its id, and for how many seconds it holds."""
        return self._call("/v3/lease/grant", {"TTL": ttl_s}, lambda answer: (int(answer["ID"]), _seconds(answer)))

    def keep_alive(self, lease: int) -> float:
        """Renew a lease; return for how many seconds it holds from now, 0 if it is gone."""
        return self._call("/v3/lease/keepalive", {"ID": str(lease)}, lambda answer: _seconds(answer["result"]))

    def revoke(self, lease: int) -> None:
        self._call("/v3/lease/revoke", {"ID": str(lease)}, _checked)

    # Keys.

    def get(self, key: str) -> EtcdEntry | None:
        return self._call("/v3/kv/range", {"key": _wire(key)}, lambda answer: _entries(_checked(answer))).get(key)

    def below(self, prefix: str) -> dict[str, EtcdEntry]:
        last = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        body = {"key": _wire(prefix), "range_end": _wire(last)}
        return self._call("/v3/kv/range", body, lambda answer: _entries(_checked(answer)))

    def create(self, key: str, value: str, lease: int) -> EtcdEntry:
        """Put ``value`` at ``key`` under ``lease`` unless the key is there; return what is there then."""
        put = {"request_put": {"key": _wire(key), "value": _wire(value), "lease": str(lease)}}
        read = {"request_range": {"key": _wire(key)}}
        body = {"compare": [_made_in(key, 0)], "success": [put, read], "failure": [read]}
        return self._call(
            "/v3/kv/txn", body, lambda answer: _entries(_checked(answer)["responses"][-1]["response_range"])[key]
        )

    def put_if(
        self, key: str, create_revision: int, values: Mapping[str, str], versions: Mapping[str, int]
    ) -> dict[str, EtcdEntry] | None:
        """Put all of ``values`` if ``key`` still is the one made in ``create_revision``, at these ``versions``.

        A member that did not answer may have done what another one is asked then, or do it at any time. With one
        of ``values`` in ``versions``, this is done once, and never after a later write with the same one.

        Returns:
            None if they were put; else what is there of ``key`` and ``values``.
        """
        compare = [_made_in(key, create_revision), *(_has_version(k, number) for k, number in versions.items())]
        puts = [{"request_put": {"key": _wire(k), "value": _wire(v)}} for k, v in values.items()]
        reads = [{"request_range": {"key": _wire(k)}} for k in (key, *values)]

        def read(answer: dict[str, Any]) -> dict[str, EtcdEntry] | None:
            if _checked(answer).get("succeeded", False) is True:
                return None
            answers = zip(reads, answer["responses"], strict=True)
            return dict(ChainMap(*(_entries(each["response_range"]) for _, each in answers)))

        return self._call("/v3/kv/txn", {"compare": compare, "success": puts, "failure": reads}, read)

    def close(self) -> None:
        self._http.close()

    # Calls.

    def _call(self, path: str, body: Mapping[str, object], read: Callable[[dict[str, Any]], T]) -> T:
        """Ask the endpoints in turn; return what ``read`` makes of the first answer that it can read."""
        until = time.monotonic() + self._timeout_s
        problem = ""
        for number in range(len(self._endpoints)):
            endpoint = self._endpoints[self._first % len(self._endpoints)]
            left = (until - time.monotonic()) / (len(self._endpoints) - number)
            try:
                return _understood(f"{endpoint}{path}", self._ask(endpoint, path, body, max(left, LEAST_S)), read)
            except EtcdUnreachable as error:
                problem = str(error)
                self._first += 1
        raise EtcdUnreachable(f"etcd: {problem}")

    def _ask(self, endpoint: str, path: str, body: Mapping[str, object], timeout_s: float) -> dict[str, Any]:
        """Return one endpoint's answer; log in again if it does not take the old token."""
        if self._login is None:
            return self._post(endpoint, path, body, timeout_s)
        with self._lock:
            token = self._token or self._authenticate(endpoint, timeout_s)
        try:
            return self._post(endpoint, path, body, timeout_s, token)
        except _StaleToken:
            with self._lock:
                token = self._authenticate(endpoint, timeout_s) if self._token == token else self._token
            return self._post(endpoint, path, body, timeout_s, token)

    def _authenticate(self, endpoint: str, timeout_s: float) -> str:
        assert self._login is not None
        path = "/v3/auth/authenticate"
        answer = self._post(endpoint, path, self._login, timeout_s)
        self._token = _understood(f"{endpoint}{path}", answer, lambda said: str(_checked(said)["token"]))
        return self._token

    def _post(
        self, endpoint: str, path: str, body: Mapping[str, object], timeout_s: float, token: str = ""
    ) -> dict[str, Any]:
        headers = {"Authorization": token} if token else {}
        try:
            response = self._http.post(f"{endpoint}{path}", json=body, headers=headers, timeout=timeout_s)
            answer = response.json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, RecursionError) as error:
            raise EtcdUnreachable(f"{endpoint}: {type(error).__name__} {error}") from error
        if not isinstance(answer, dict):
            raise EtcdUnreachable(f"{endpoint}: no object")
        if response.status_code != httpx.codes.OK or "error" in answer:
            what = f"{endpoint}{path}: {str(answer.get('message') or answer.get('error'))[:200]}"
            code = str(answer.get("code", ""))
            if code in _UNAVAILABLE:
                raise EtcdUnreachable(what)
            raise (_StaleToken if code == _UNAUTHENTICATED else EtcdRefused)(f"etcd: {what}")
        return answer


class _StaleToken(EtcdRefused):
    """The token has expired, or is from before etcd was started."""


def _understood(where: str, answer: dict[str, Any], read: Callable[[dict[str, Any]], T]) -> T:
    """Return what ``read`` makes of an answer. Raises EtcdUnreachable: it is no answer of etcd's to this call."""
    try:
        return read(answer)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise EtcdUnreachable(
            f"{where}: no answer of etcd's ({type(error).__name__} {error}"[:300] + ")"
        ) from error


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer that has etcd's header; without it "nothing is there" would be just an empty object."""
    int(answer["header"]["revision"])
    return answer


def _seconds(answer: dict[str, Any]) -> float:
    """Return how long a lease holds; etcd leaves out a 0."""
    seconds = float(_checked(answer).get("TTL", 0))
    if not math.isfinite(seconds):
        raise ValueError(f"a lease of {seconds} s")
    return seconds


def _entries(answer: Mapping[str, Any]) -> dict[str, EtcdEntry]:
    """Return the keys of an answer to a range. Raises ValueError: some are missing."""
    found = dict(_entry(each) for each in answer.get("kvs", ()))
    if int(answer.get("count", 0)) != len(found):
        raise ValueError(f"{len(found)} keys of {answer.get('count', 0)}")
    return found


def _entry(found: Mapping[str, Any]) -> tuple[str, EtcdEntry]:
    key, value = (base64.b64decode(found.get(part, ""), validate=True) for part in ("key", "value"))
    revision, version = int(found["create_revision"]), int(found["version"])
    return key.decode(errors="replace"), EtcdEntry(value.decode(errors="replace"), revision, version)


def _made_in(key: str, revision: int) -> dict[str, str]:
    return {"target": "CREATE", "key": _wire(key), "create_revision": str(revision), "result": "EQUAL"}


def _has_version(key: str, version: int) -> dict[str, str]:
    return {"target": "VERSION", "key": _wire(key), "version": str(version), "result": "EQUAL"}


def _wire(text: str) -> str:
    return base64.b64encode(text.encode()).decode()

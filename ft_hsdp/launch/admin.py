"""The operator's orders to the lighthouse of a job, such as `drain` and `scale`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from typing import Literal
from urllib.parse import quote

import httpx

from ft_hsdp import secret, tls
from ft_hsdp.config import Config, load
from ft_hsdp.control.lighthouse_client import LighthouseClient, Unproved, get_proved, urls_of_run
from ft_hsdp.errors import EXIT_CONFIG, EXIT_RETRYABLE, ConfigError, FtHsdpError, LighthouseUnreachable, one_line
from ft_hsdp.launch.run.directory import RunDir, read_json

Action = Literal["evict", "drain", "undrain", "checkpoint", "scale", "host-lost"]

ADMIN_VARIABLE = "FT_HSDP_ADMIN_TOKEN"
ANSWER_S = 10.0  # longest wait for one answer


class NotDone(FtHsdpError):
    """The lighthouse refuses an order; ``exit_code`` is 75 if a later try may succeed, otherwise 64."""

    def __init__(self, why: str, exit_code: int) -> None:
        super().__init__(why)
        self.exit_code = exit_code


def order(
    run: RunDir,
    action: Action,
    replica: int | None = None,
    reason: str = "",
    force: bool = False,
    replicas: int | None = None,
    host: str = "",
) -> str:
    """Give the lighthouse of a running job an order, and return in one line what will happen.

    The admin's token is read from the run's admin_token, or else from the environment.

    Args:
        replica: With evict, and with drain and undrain unless there is a host: the replica.
        reason: For the job's journal.
        force: With drain and scale: even below quorum.min_replicas, or without a spare host.
        replicas: With scale: the number of replicas.
        host: With host-lost, drain and undrain: the host's name.

    Raises:
        ConfigError: There is no token, the token is wrong, or `replicas` is too large.
        LighthouseUnreachable: The job has no lighthouse, or it does not answer.
        NotDone: The lighthouse refuses.
    """
    tokens = secret.read(run.admin_token, ADMIN_VARIABLE)
    if not tokens:
        allowed = f"a file with the admin's token; or the token in {ADMIN_VARIABLE}"
        raise ConfigError("admin_token", str(run.admin_token), allowed)
    urls = urls_of_run(read_json(run.lighthouse))
    if not urls:
        raise LighthouseUnreachable(f"there is no {run.lighthouse}: the job in {run.path} has no lighthouse")
    whole = action in ("checkpoint", "scale")
    path = f"/v1/admin/{action}" if whole else f"/v1/admin/replicas/{replica}/{action}"
    path = f"/v1/admin/hosts/{quote(host, safe='')}/{action.removeprefix('host-')}" if host else path
    body = {"reason": reason, **({"force": True} if force else {})}
    config = load(run.config)
    if action == "scale":
        if replicas is None or not 1 <= replicas <= config.slots:
            raise ConfigError("N", replicas, f"1 to max_replicas ({config.slots})")
        body["replicas"] = replicas
    context = tls.client(config.network)
    try:
        status, detail = asyncio.run(_post(urls, tokens[0], path, json.dumps(body).encode(), context))
    except LighthouseUnreachable as error:
        if not (isinstance(error.__cause__, Unproved) and _genuine(run, urls, config)):
            raise
        status, detail = 403, "the job's lighthouse does not know this one"
    if status == 200:
        return detail
    if status == 403:
        raise ConfigError("admin_token", str(run.admin_token), f"the admin's token of this job ({detail})")
    retry = status == 429 or status >= 500
    raise NotDone(f"{action}: {detail}", EXIT_RETRYABLE if retry else EXIT_CONFIG)


def _genuine(run: RunDir, urls: tuple[str, ...], config: Config) -> bool:
    """Return whether a lighthouse of the job answers: then an order that it does not know has a wrong token."""
    for url in urls:
        with contextlib.suppress(OSError, httpx.HTTPError, httpx.InvalidURL):
            get_proved(f"{url}/healthz", secret.current(run.token), ANSWER_S, tls.trusted(config.network))
            return True
    return False


async def _post(
    urls: tuple[str, ...], token: str, path: str, body: bytes, context: ssl.SSLContext | None
) -> tuple[int, str]:
    """Post an order, and return the status of the answer and its text as one line."""
    client = LighthouseClient(urls, token, context, reply_s=ANSWER_S)
    try:
        response = await client.post(path, body)
    finally:
        await client.close()
    try:
        detail = str(response.json()["detail"])
    except (ValueError, KeyError, TypeError):
        detail = one_line(response.text)[:200]
    return response.status_code, detail or f"HTTP status {response.status_code}"

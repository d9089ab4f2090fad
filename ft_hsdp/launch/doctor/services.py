"""Services that are elsewhere: the lighthouse, and etcd."""

from __future__ import annotations

import ssl
from urllib.parse import urlsplit

import httpx

from ft_hsdp import tls
from ft_hsdp.errors import LighthouseUnreachable
from ft_hsdp.launch.doctor.finding import Bad, Subject
from ft_hsdp.launch.doctor.names import addresses
from lighthouse.ha.etcd import Etcd, EtcdRefused, EtcdUnreachable

ANSWER_S = 2.0
ETCD_S = 5.0  # for all endpoints


def lighthouse(subject: Subject) -> str:
    """Whether a lighthouse answers, and what its name means here."""
    found = []
    for url in subject.lighthouses:
        there = urlsplit(url).hostname or ""
        try:
            first = addresses(there)[0]
        except OSError as error:
            why = error.strerror or error
            raise Bad(f"{there} in {url} has no address ({why}); correct the name, /etc/hosts or DNS") from None
        found.append(f"{url} answers" if first == there else f"{url} answers at {first}")
    try:
        healthz(subject)
    except LighthouseUnreachable as error:
        raise Bad(f"{error}; start it, or open its port in the firewalls between") from None
    return "; ".join(found) if len(found) == 1 else f"one of {', '.join(subject.lighthouses)} answers"


def healthz(subject: Subject) -> httpx.Response:
    """The answer of the first lighthouse that gives one. Raises LighthouseUnreachable."""
    problem = ""
    for url in subject.lighthouses:
        try:
            trusted = tls.trusted(subject.config.network)
            response = httpx.get(f"{url}/healthz", timeout=ANSWER_S, trust_env=False, verify=trusted)
            return response.raise_for_status()
        except (httpx.HTTPError, httpx.InvalidURL, ssl.SSLError) as error:
            problem = f"{url} does not answer ({str(error) or type(error).__name__})"
    raise LighthouseUnreachable(problem)


def etcd(subject: Subject) -> str:
    """Whether a majority of the endpoints answers a read."""
    endpoints, prefix = subject.config.lighthouse.etcd, subject.config.lighthouse.etcd_prefix
    problems = []
    for endpoint in endpoints:
        client = Etcd.with_secrets((endpoint,), ETCD_S / len(endpoints))
        try:
            client.get(f"{prefix}/doctor")
        except EtcdRefused as error:
            raise Bad(
                f"{endpoint}: {error}; are user and password right, and may the user read {prefix}?"
            ) from None
        except EtcdUnreachable as error:
            problems.append(str(error))
        finally:
            client.close()
    well = len(endpoints) - len(problems)
    if well == 0:
        raise Bad(f"{problems[0]}; start etcd, or correct lighthouse.ha.etcd")
    return f"{well} of {len(endpoints)} endpoints answer" + (f" ({problems[0]})" if problems else "")

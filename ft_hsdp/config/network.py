"""The sections on the network, the lighthouse, and a Ray cluster that runs the ranks."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any, Literal, Self, get_args
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from ft_hsdp.config.base import Int, Number, PathText, Section, refuse


def _switch(value: object) -> object:
    """Return "on" or "off" where YAML has read them as true or false."""
    return ("on" if value else "off") if isinstance(value, bool) else value


class NetworkConfig(Section):
    """Addresses, certificates and encryption of connections."""

    host: str = Field("127.0.0.1", min_length=1, max_length=255, description="address the lighthouse listens on")
    port: Int = Field(0, ge=0, le=65535, description="port of the lighthouse; 0 takes a free one")
    state_interface: str | None = Field(
        None,
        min_length=1,
        max_length=255,
        description="address, or name of the interface, on which states are served; null means network.host",
    )
    interfaces: tuple[Annotated[str, StringConstraints(min_length=1, max_length=255)], ...] = Field(
        (),
        max_length=64,
        description="names (ib0) or addresses of a machine's interfaces, which its ranks use in turns, by local "
        "rank, for gradients; none: network.host",
    )
    allow: tuple[str, ...] = Field(
        (),
        max_length=64,
        description="networks (10.0.0.0/8) in which replicas may listen; none: the addresses from which they ask, "
        "and loopback",
    )
    tls: Annotated[Literal["auto", "on", "off"], BeforeValidator(_switch)] = Field(
        "auto",
        description="whether connections between ranks are encrypted: auto, between hosts; on, all but shared "
        "memory. Connections to the lighthouse are encrypted if it has a certificate",
    )
    tls_certificate: PathText | None = Field(
        None, description="PEM file of the lighthouse's certificate: it then speaks HTTPS"
    )
    tls_key: PathText | None = Field(None, description="PEM file of the certificate's key")
    tls_ca: PathText | None = Field(
        None,
        description="PEM file of the authority that clients' and the lighthouse's certificates must be signed by",
    )
    client_certificate: PathText | None = Field(
        None, description="PEM file of the certificate that clients show if tls_ca is set"
    )
    client_key: PathText | None = Field(None, description="PEM file of that certificate's key")

    def of_rank(self, local: int) -> tuple[str, str]:
        """Return the key and the value that say where a rank's ring listens; `local`: the rank on its machine."""
        if not self.interfaces:
            return "network.host", self.host
        return "network.interfaces", self.interfaces[local % len(self.interfaces)]

    @model_validator(mode="after")
    def _check(self) -> Self:
        for a, b in (("tls_certificate", "tls_key"), ("client_certificate", "client_key")):
            for one, other in ((a, b), (b, a)):
                if getattr(self, one) is not None and getattr(self, other) is None:
                    raise refuse(one, getattr(self, one), f"null without network.{other}")
        if self.client_certificate is not None and self.tls_ca is None:
            raise refuse("client_certificate", self.client_certificate, "null without network.tls_ca")
        if self.tls_ca is not None and (self.tls_certificate is None or self.client_certificate is None):
            raise refuse(
                "tls_ca",
                self.tls_ca,
                "null without network.tls_certificate and network.client_certificate: both sides show one",
            )
        for network in self.allow:
            try:
                ipaddress.ip_network(network)
            except ValueError as error:
                raise refuse("allow", network, f"networks such as 10.0.0.0/8 or fd00::/8 ({error})") from None
        return self


class LighthouseConfig(Section):
    """The lighthouse: where it keeps what must outlive it, and what it shows."""

    etcd: tuple[str, ...] = Field(
        (),
        max_length=16,
        description="URLs of an etcd cluster that elects the leader and keeps its state; none: SQLite",
    )
    etcd_lease_s: Int = Field(2, ge=1, le=600, description="silence after which a leader is replaced")
    count: Int = Field(1, ge=1, le=5, description="lighthouses that `up` starts; more than one needs etcd")
    tensorboard: bool = Field(True, description="write curves for TensorBoard into the folder of the run")
    wandb: str | None = Field(
        None, min_length=1, max_length=128, description="project at Weights & Biases that also gets the curves"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.count > 1 and not self.etcd:
            raise refuse("count", self.count, "1 without lighthouse.etcd: etcd elects the leader")
        return self


AlertRule = Literal["stall", "loss", "replicas", "protection", "restarts", "clock", "disk", "culprit", "halted"]
WEBHOOK = "a URL (it may be a secret, and is not shown)"


class AlertConfig(Section):
    """Whom the lighthouse tells what needs people: a webhook, or a program (docs/lighthouse.md)."""

    url: str | None = Field(
        None,
        pattern=r"^https?://[^\s/?#]+[^\s]*$",
        max_length=2048,
        description="webhook, http:// or https://, that gets each alert as JSON in the form that Slack takes",
    )
    command: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (),
        max_length=64,
        description="program and its arguments, run on the lighthouse's machine with each alert as JSON on its "
        "standard input",
    )
    rules: tuple[AlertRule, ...] = Field(
        get_args(AlertRule), min_length=1, description="what is told; by default everything"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.url is not None and self.command:
            raise refuse("url", WEBHOOK, "null with a command: exactly one of url and command")
        if self.url is None and not self.command:
            raise refuse("command", [], "a program and its arguments, or a url instead")
        try:
            fits = self.url is None or (urlsplit(self.url).hostname and urlsplit(self.url).port != 0)
        except ValueError:
            fits = False
        if not fits:
            raise refuse("url", WEBHOOK, "a URL with a host, and with a port from 1 to 65535 if it has one")
        return self


Amount = Annotated[Number, Field(ge=0, le=10**9)]
Label = Annotated[str, Field(min_length=1, max_length=253)]


class RayConfig(Section):
    """What `submit` requests from a Ray cluster: one placement group per replica, one bundle per rank."""

    resources: dict[str, Amount] = Field(
        {},
        description="what the cluster sets aside for a rank, by Ray's names: CPU (1 if not given), GPU (set 1 "
        "with train.device cuda), and others",
    )
    strategy: Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"] = Field(
        "STRICT_PACK",
        description="ranks of a replica: on one node (STRICT_PACK), on few, on several, or each on its own",
    )
    labels: dict[str, Label] = Field(
        {}, description="labels that a node must have, e.g. {ray.io/accelerator-type: H200}"
    )
    zone_label: str = Field(
        "ray.io/availability-zone", min_length=1, description="label of a node that names its zone"
    )
    zones: tuple[Label, ...] = Field(
        (), max_length=64, description="replica r is placed in zone r modulo their number; none: anywhere"
    )
    runtime_env: dict[str, Any] = Field(
        {}, description="Ray's runtime environment of all its processes, e.g. {working_dir: .}"
    )
    folder: PathText = Field(
        "/tmp/ft_hsdp-{uid}",  # noqa: S108 - its owner and mode are checked
        description="folder on each node for what its ranks write ({uid}: the user's number there), which is "
        "collected into the run's folder; the user's own or root's, where others write only as in /tmp",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        gpus = self.bundle.get("GPU", 0.0)
        if gpus > 1 and gpus % 1:
            raise refuse("resources.GPU", gpus, "a whole number, or a part of one GPU")
        if not self.bundle:
            allowed = "more than 0 without GPUs and other resources: a rank that asks for nothing has no place"
            raise refuse("resources.CPU", 0.0, allowed)
        variables = self.runtime_env.get("env_vars")
        for name, value in variables.items() if isinstance(variables, dict) else ():
            if not isinstance(value, str):  # Ray would show it, and it may be a secret
                raise refuse(f"runtime_env.env_vars.{name}", type(value).__name__, "text: put it in quotes")
        return self

    @property
    def bundle(self) -> dict[str, float]:
        """What a rank asks for, by Ray's names; nothing of it is 0."""
        return {name: amount for name, amount in {"CPU": 1.0, **self.resources}.items() if amount > 0}

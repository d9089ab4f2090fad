"""The section that says where a Ray cluster runs the ranks."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from ft_hsdp.config.base import Number, Section, refuse

Amount = Annotated[Number, Field(ge=0, le=10**9)]
Label = Annotated[str, Field(min_length=1, max_length=253)]

_OWN_KEYS = ("CPU", "GPU")


class RayConfig(Section):
    """What `submit` asks of a cluster: one placement group per replica, one bundle per rank."""

    cpus_per_rank: Amount = Field(1.0, description="CPUs that the cluster sets aside for a rank")
    gpus_per_rank: Amount = Field(0.0, description="GPUs of a rank; 1 with train.device cuda")
    resources: dict[str, Amount] = Field(
        {},
        description="other resources of a rank, by name",
        json_schema_extra={"propertyNames": {"not": {"enum": [*_OWN_KEYS]}}},
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
    folder: str = Field(
        "/tmp/ft_hsdp-{uid}",  # noqa: S108 - its owner and mode are checked
        min_length=1,
        description="folder on each node for what its ranks write ({uid}: the user's number there), which is "
        "collected into the run's folder; the user's own or root's, where others write only as in /tmp",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in _OWN_KEYS:
            if name in self.resources:
                raise refuse("resources", name, "other names; CPUs and GPUs have keys of their own")
        if self.gpus_per_rank > 1 and self.gpus_per_rank % 1:
            raise refuse("gpus_per_rank", self.gpus_per_rank, "a whole number, or a part of one GPU")
        if not any((self.cpus_per_rank, self.gpus_per_rank, *self.resources.values())):
            allowed = "more than 0 without GPUs and other resources: a rank that asks for nothing has no place"
            raise refuse("cpus_per_rank", self.cpus_per_rank, allowed)
        return self

"""Pools file: places to buy machines, and their conditions.

It is a YAML file whose path is in ``VCASGD_POOLS``. Without it, the only pool is ``local``. Unknown
fields are refused::

    pools:
      - name: aws-spot
        provider: aws
        region: us-east-1
        zones: [us-east-1a, us-east-1b]
        machine_types: [c5.xlarge, m5.xlarge]
        max_machines: 20
        labels: [eu-only]
        template: {launch_template: lt-0abc, subnets: {us-east-1a: subnet-1, us-east-1b: subnet-2}}
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from vcasgd.errors import SpecError
from vcasgd.spec.access import POOL_PATTERN
from vcasgd.spec.hardware import Hardware, suits
from vcasgd.spec.job import JobSpec, Label
from vcasgd.spec.problems import spec_error
from vcasgd.spec.values import Duration, Size, StrictModel, parse_size
from vcasgd.spec.yaml import load_mapping

if TYPE_CHECKING:
    from vcasgd.fleet.observed import PoolStatus

#: Name of the pool that exists without a file.
LOCAL_POOL = "local"
#: Provider of pools whose machines join by themselves.
JOIN = "join"
#: Providers from which the stack orders machines that join through the gateway.
ORDERED_PROVIDERS = ("slurm", "kubernetes", "exec")
#: Providers whose machines join through the gateway, so that they aren't part of Ray's cluster.
JOINING_PROVIDERS = (JOIN, *ORDERED_PROVIDERS)
#: Providers whose machines cause no bill, even if they have a simulated price.
FREE_PROVIDERS = ("local", JOIN)

#: Providers that give no notice on request. EC2 interrupts spot machines only in experiments of its
#: Fault Injection Service, which need a template and a role of their own.
WITHOUT_EVICTION = ("aws",)

Name = Annotated[str, Field(min_length=1, max_length=255)]
#: Value of an option of sbatch.
SlurmName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.&|*,:=-]{1,255}$")]
#: Name of an object of Kubernetes.
KubernetesName = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")]
#: Program and arguments.
Command = Annotated[
    tuple[Annotated[str, Field(min_length=1, max_length=10_000)], ...], Field(min_length=1)
]
#: Letters in the name of a pool whose machines are ordered, which is part of their names.
MAX_ORDERED_POOL = 20
#: Fields of a pod and a container that the stack sets itself.
_OWN_POD = ("containers", "restartPolicy", "terminationGracePeriodSeconds")
_OWN_CONTAINER = ("name", "image", "command", "args")


_SECRETS = "variables that the machine fetches from the secret store itself, by secret"


class LocalTemplate(StrictModel):
    """Simulated properties of this computer's machines. None means the value of the settings."""

    price_per_hour: float | None = Field(default=None, ge=0, description="USD, spot")
    on_demand_price_per_hour: float | None = Field(default=None, ge=0, description="USD")
    boot_seconds: float | None = Field(default=None, ge=0, description="simulated boot time")
    notice_seconds: float | None = Field(default=None, ge=0, description="length of a notice")


class AwsTemplate(StrictModel):
    """EC2 launch template, by name or id (``lt-…``), with a subnet for each zone.

    ``secrets`` maps environment variables to names or ARNs in Secrets Manager. The machine fetches
    their values itself, so they aren't in its user data.
    """

    launch_template: Name = Field(description="its name or ID")
    version: str = Field(
        default="$Default",
        pattern=r"^(\$Default|\$Latest|[1-9][0-9]*)$",
        description="version of the launch template",
    )
    subnets: dict[str, Name] = Field(
        default_factory=dict, description="a subnet for each zone; by default the zone's own"
    )
    secrets: dict[str, Name] = Field(default_factory=dict, description=_SECRETS)


class GcpTemplate(StrictModel):
    """Compute Engine instance template: a name or ``regions/<region>/instanceTemplates/<name>``.

    Other fields override the template's values. ``secrets`` maps environment variables to secrets
    in Secret Manager (``projects/<project>/secrets/<name>``). The machine fetches their values
    itself, so they aren't in its metadata.
    """

    project: Name = Field(description="ID of the project")
    instance_template: Name = Field(description="its name or path")
    network: Name | None = Field(default=None, description="instead of the template's")
    subnetwork: Name | None = Field(default=None, description="instead of the template's")
    service_account: Name | None = Field(default=None, description="instead of the template's")
    secrets: dict[str, Name] = Field(default_factory=dict, description=_SECRETS)


class SlurmTemplate(StrictModel):
    """Resources of each job, and how it starts ``vcasgd join``. None means Slurm's default.

    ``token_file`` is read on the compute node, so that Slurm never stores the token.
    """

    token_file: Name = Field(pattern=r"^/", description="file with the token, on the nodes, too")
    setup: str = Field(default="", max_length=10_000, description="shell commands to run first")
    account: SlurmName | None = Field(default=None, description="account of the jobs")
    qos: SlurmName | None = Field(default=None, description="quality of service")
    constraint: SlurmName | None = Field(default=None, description="features of the nodes")
    memory: str | None = Field(
        default=None, pattern=r"^[1-9][0-9]*[KMGT]$", description="memory of each job, such as 8G"
    )
    time_limit: Duration | None = Field(default=None, description="time limit of each job")
    output: Name = Field(default="/dev/null", description="file for the output; %A, %a: the job")
    price_per_hour: float = Field(default=0.0, ge=0, description="USD of one machine")

    @property
    def memory_gb(self) -> float | None:
        """Memory in GB; Slurm's units are powers of 1024. None if it isn't set."""
        known = self.memory is not None and not self.memory.endswith("K")
        return parse_size(f"{self.memory}i") if known else None


class KubernetesTemplate(StrictModel):
    """The pod of each machine, and where it runs.

    ``pod`` and ``container`` are further fields of a pod's and a container's specification, as in a
    manifest. The secret ``token_secret`` has the token under the key ``token``; only the container
    gets it.
    """

    image: Name = Field(description="image with vcasgd")
    token_secret: KubernetesName = Field(description="secret with the token for joining")
    namespace: KubernetesName = Field(default="default", description="namespace of the pods")
    context: Name | None = Field(default=None, description="of the kubeconfig")
    memory: str | None = Field(
        default=None, pattern=r"^[1-9][0-9]*(Mi|Gi|M|G)$", description="memory of each pod"
    )
    grace_seconds: int = Field(
        default=60, ge=1, le=3600, strict=True, description="time between notice and end"
    )
    pod: dict[str, Any] = Field(
        default_factory=dict, description="further fields of the pod's specification"
    )
    container: dict[str, Any] = Field(
        default_factory=dict, description="further fields of the container's specification"
    )
    price_per_hour: float = Field(default=0.0, ge=0, description="USD of one machine")

    @property
    def memory_gb(self) -> float | None:
        """Memory in GB; None if it isn't set."""
        return None if self.memory is None else parse_size(self.memory)

    @field_validator("pod")
    @classmethod
    def _pod_is_ours(cls, value: dict[str, Any]) -> dict[str, Any]:
        return _without(value, _OWN_POD)

    @field_validator("container")
    @classmethod
    def _container_is_ours(cls, value: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(value.get("env", []), list):
            raise ValueError("env must be a list")
        return _without(value, _OWN_CONTAINER)


class ExecTemplate(StrictModel):
    """Commands that list, launch, and terminate machines, and the machines' prices.

    Commands get JSON, and the variables of the controller that ``env`` names. ``token_file`` is on
    the controller's machine; ``launch`` gets the token.
    """

    #: The pool's own field says it.
    memory_gb: ClassVar[float | None] = None

    list: Command = Field(description="command that prints the machines")
    launch: Command = Field(description="command that launches a machine")
    terminate: Command = Field(description="command that ends a machine")
    token_file: Name = Field(description="file with the token for joining")
    env: tuple[Name, ...] = Field(
        default=(), description="variables of the controller that the commands get"
    )
    timeout: Duration = Field(
        default=timedelta(seconds=30),
        gt=timedelta(0),
        le=timedelta(seconds=30),
        description="time limit of a command",
    )
    price_per_hour: float = Field(default=0.0, ge=0, description="USD of one machine")
    on_demand_price_per_hour: float | None = Field(
        default=None, ge=0, description="USD of one machine; default: price_per_hour"
    )


def _without(value: dict[str, Any], own: Iterable[str]) -> dict[str, Any]:
    if given := sorted(value.keys() & set(own)):
        raise ValueError(f"{given[0]} is set by the stack; remove it")
    return value


class PoolSpec(StrictModel):
    """One place to buy machines, in any cloud."""

    name: str = Field(
        pattern=POOL_PATTERN,
        description="up to 40 lowercase letters, digits, and dashes; local only with the provider "
        "local",
    )
    provider: Literal["local", "aws", "gcp", "join", "slurm", "kubernetes", "exec"] = Field(
        description="where machines come from"
    )
    region: str = Field(default="", description="region of a cloud; required for aws and gcp")
    zones: tuple[Name, ...] = Field(
        default=(), description="zones; required for aws and gcp; partitions of slurm"
    )
    machine_types: tuple[Name, ...] = Field(
        default=(), description="what to buy; required for aws and gcp"
    )
    spot: bool = Field(default=True, description="false buys on demand")
    max_machines: int | None = Field(
        default=None,
        ge=0,
        le=10_000,
        strict=True,
        description="most machines in the pool; by default the cloud's limit",
    )
    labels: frozenset[Label] = Field(
        default=frozenset(), description="labels of data that the pool is cleared for"
    )
    trust: Literal["own", "volunteer"] = Field(
        default="own", description="volunteer: what its machines send is screened"
    )
    boot_seconds: float = Field(
        default=300.0,
        gt=0,
        description="time limit for a machine to join; 900 by default for slurm, kubernetes, and "
        "exec",
    )
    max_price_per_hour: float | None = Field(
        default=None, gt=0, description="USD per hour of one machine"
    )
    template: Any = Field(default=None, description="fields of the provider")
    cpus: float | None = Field(
        default=None, gt=0, description="of each machine; default: by its type"
    )
    gpus: int | None = Field(default=None, ge=0, strict=True, description="of each machine")
    memory: Size | None = Field(default=None, description="of each machine, such as 16GB")
    gpu: str | None = Field(
        default=None, min_length=1, max_length=100, description="the GPU's name"
    )
    gpu_memory: Size | None = Field(default=None, description="of one GPU")

    @field_validator("zones", "machine_types")
    @classmethod
    def _no_duplicates(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) < len(value):
            raise ValueError("contains a duplicate")
        return value

    @model_validator(mode="after")
    def _fits_its_provider(self) -> PoolSpec:
        # the command line submits jobs for this pool without asking about costs
        if self.name == LOCAL_POOL and self.provider != "local":
            raise ValueError(f"the name {LOCAL_POOL} is reserved for the provider local")
        if self.trust == "volunteer" and self.provider not in JOINING_PROVIDERS:
            # An owner is the token that a machine joined with.
            raise ValueError("trust: volunteer is for pools whose machines join")
        return self


class LocalPoolSpec(PoolSpec):
    """Pool whose machines are processes on this computer."""

    provider: Literal["local"]
    zones: tuple[Name, ...] = ("local",)
    machine_types: tuple[Name, ...] = ("process",)
    template: LocalTemplate = LocalTemplate()


class JoinPoolSpec(PoolSpec):
    """Pool of machines that join by themselves (``vcasgd join``). Nothing is bought in it.

    Only jobs that name it use it, unless there is no other pool.
    """

    provider: Literal["join"]
    zones: tuple[Name, ...] = ("anywhere",)
    machine_types: tuple[Name, ...] = ("machine",)
    template: None = None


class _OrderedPoolSpec(PoolSpec):
    """Pool whose machines are ordered, and join through the gateway."""

    boot_seconds: float = Field(default=900.0, gt=0)

    @model_validator(mode="after")
    def _short_name(self) -> _OrderedPoolSpec:
        if len(self.name) > MAX_ORDERED_POOL:
            raise ValueError(f"name has more than {MAX_ORDERED_POOL} letters")
        return self


class SlurmPoolSpec(_OrderedPoolSpec):
    """Pool whose machines are jobs of a Slurm cluster. Its zones are partitions."""

    provider: Literal["slurm"]
    zones: tuple[SlurmName, ...] = Field(min_length=1)
    machine_types: tuple[Name, ...] = Field(default=("node",), min_length=1, max_length=1)
    cpus: int | None = Field(default=None, ge=1, strict=True)
    template: SlurmTemplate


class KubernetesPoolSpec(_OrderedPoolSpec):
    """Pool whose machines are pods. Zones and types are labels of nodes; the default is any."""

    provider: Literal["kubernetes"]
    zones: tuple[Name, ...] = Field(default=("any",), min_length=1)
    machine_types: tuple[Name, ...] = Field(default=("node",), min_length=1)
    template: KubernetesTemplate

    @model_validator(mode="after")
    def _consistent(self) -> KubernetesPoolSpec:
        if "affinity" in self.template.pod and self.model_fields_set & {"zones", "machine_types"}:
            raise ValueError("template.pod.affinity excludes zones and machine_types")
        return self


class ExecPoolSpec(_OrderedPoolSpec):
    """Pool of machines in any cloud that has a command line."""

    provider: Literal["exec"]
    zones: tuple[Name, ...] = Field(default=("any",), min_length=1)
    machine_types: tuple[Name, ...] = Field(default=("machine",), min_length=1)
    template: ExecTemplate


class _CloudPoolSpec(PoolSpec):
    """Pool that has no defaults for where and what it buys."""

    @model_validator(mode="after")
    def _somewhere(self) -> _CloudPoolSpec:
        for field in ("region", "zones", "machine_types"):
            if not getattr(self, field):
                raise ValueError(f"{field} is required for provider {self.provider}")
        return self


class AwsPoolSpec(_CloudPoolSpec):
    """Pool of EC2 machines in one region, from a launch template."""

    provider: Literal["aws"]
    template: AwsTemplate

    @model_validator(mode="after")
    def _each_zone_has_a_subnet(self) -> AwsPoolSpec:
        missing = [zone for zone in self.zones if zone not in self.template.subnets]
        if self.template.subnets and missing:
            raise ValueError(f"template.subnets has no subnet for zone {missing[0]}")
        return self


class GcpPoolSpec(_CloudPoolSpec):
    """Pool of Compute Engine instances in one region, from an instance template."""

    provider: Literal["gcp"]
    template: GcpTemplate

    @model_validator(mode="after")
    def _zones_of_the_region(self) -> GcpPoolSpec:
        for zone in self.zones:
            if not zone.startswith(f"{self.region}-"):
                raise ValueError(f"zone {zone} is not in region {self.region}")
        return self


def pools_of_job(
    spec: JobSpec,
    pools: Iterable[PoolSpec | PoolStatus],
    kinds: Mapping[str, Collection[Hardware]],
) -> tuple[str, ...]:
    """Return the names of a job's pools, in order of preference; they may not exist.

    Without ``workers.pools`` these are the spot pools that may see the job, and whose machines
    suit its ``resources``. If there are none, they are its on-demand pools. Only if no other pool
    may see it, they are pools of machines that join; and if none may, all pools, which say why not.
    ``pools`` are as configured or as published. ``kinds``: the machines of each pool, as far as
    they are known.
    """
    if spec.workers.pools is not None:
        return spec.workers.pools
    every = tuple(pools)
    cleared = [pool for pool in every if pool.labels.issuperset(spec.required_labels)]
    usual = [pool for pool in cleared if pool.provider != JOIN]
    suited = [pool for pool in usual if suits(spec.resources, kinds.get(pool.name, ()))]
    chosen = [pool for pool in suited if pool.spot] or suited or usual or cleared or every
    return tuple(pool.name for pool in chosen)


_KINDS: dict[str, type[PoolSpec]] = {
    "local": LocalPoolSpec,
    "aws": AwsPoolSpec,
    "gcp": GcpPoolSpec,
    "join": JoinPoolSpec,
    "slurm": SlurmPoolSpec,
    "kubernetes": KubernetesPoolSpec,
    "exec": ExecPoolSpec,
}


def load_pools(path: Path | None) -> tuple[PoolSpec, ...]:
    """Load the pools of a file, in order; without a file, the local pool.

    Raises :class:`~vcasgd.errors.SpecError`, which names the file and the first invalid field.
    """
    if path is None:
        return (LocalPoolSpec(name=LOCAL_POOL, provider="local"),)
    value = load_mapping(path, "pools", field="VCASGD_POOLS")
    try:
        return parse_pools(value)
    except SpecError as error:
        raise SpecError(f"{path}: {error.message}", remedy=error.remedy, **error.details) from error


def parse_pools(value: object) -> tuple[PoolSpec, ...]:
    """Parse the content of the file. Raises :class:`~vcasgd.errors.SpecError`."""
    rows = value.get("pools") if isinstance(value, dict) else None
    if not isinstance(rows, list) or not rows:
        raise SpecError(
            "pools: must be a list of at least one pool",
            remedy="write a list under the key pools",
            field="pools",
        )
    if isinstance(value, dict) and (others := value.keys() - {"pools"}):
        raise SpecError(f"{min(map(str, others))}: there is no such field", field=str(min(others)))
    pools = tuple(parse_pool(row, f"pools.{index}") for index, row in enumerate(rows))
    names = [pool.name for pool in pools]
    for index, name in enumerate(names):
        if name in names[:index]:
            field = f"pools.{index}.name"
            raise SpecError(f"{field}: duplicate pool {name}", field=field)
    return pools


def pool_row(spec: PoolSpec) -> dict[str, Any]:
    """Return a pool as it is in the file, as plain data."""
    return spec.model_dump(mode="json", exclude_unset=True)


def cache_name(pool: str, labels: Collection[str]) -> str:
    """Return the folder name of a pool's cache.

    Data cached in one pool must not be visible to another, nor to the same pool under other
    labels.
    """
    if not labels:
        return pool
    return f"{pool}.{hashlib.sha256(' '.join(sorted(labels)).encode()).hexdigest()[:16]}"


def parse_pool(row: object, where: str) -> PoolSpec:
    """Parse one pool. ``where`` names it in the :class:`~vcasgd.errors.SpecError`."""
    if not isinstance(row, dict):
        raise SpecError(f"{where}: must be a mapping of fields", field=where)
    kind = _KINDS.get(str(row.get("provider")))
    if kind is None:
        raise SpecError(
            f"{where}.provider: unknown provider {row.get('provider')!r}",
            remedy=f"choose one of {', '.join(_KINDS)}",
            field=f"{where}.provider",
        )
    try:
        return kind.model_validate(row)
    except ValidationError as error:
        first = spec_error(error, kind)
        # A check of the whole pool has no field.
        path = where if first.field == "job" else f"{where}.{first.field}"
        message = first.message.removeprefix(f"{first.field}: ")
        raise SpecError(f"{path}: {message}", remedy=first.remedy, field=path) from error

"""The only reader of the environment: every setting is ``VCASGD_<NAME>``.

All time-outs of the platform derive from one setting, ``heartbeat``: whoever wants faster
detection lowers it, and nothing has to be kept consistent by hand.
"""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from vcasgd.errors import SpecError

#: a lease outlives this many missed heartbeats: long enough for a garbage collection, a
#: swap storm or a restart of the ledger, short enough that a dead worker is noticed soon
LEASE_HEARTBEATS = 8
#: a worker that makes no step for this many lease times no longer renews its lease
STALL_LEASES = 15
#: how long anybody tries again to reach a server before giving up, in lease times
PATIENCE_LEASES = 30


_STORE_SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel")
_STORAGE_SCHEMES = ("file", "s3", "gs")


def _has_form(url: str, schemes: tuple[str, ...]) -> bool:
    try:
        parts = urlsplit(url)
        if parts.scheme not in schemes:
            return False
        # of Sentinel there may be several
        hosts = [urlsplit(f"//{host}") for host in parts.netloc.rpartition("@")[2].split(",")]
        if parts.scheme.endswith("+sentinel") and not (parts.path.strip("/") and parts.netloc):
            return False
        return all(host.port is None or host.port > 0 for host in hosts)
    except ValueError:
        return False


def _check_redis_url(url: str) -> None:
    # it is never shown: it holds a password
    if not _has_form(url, _STORE_SCHEMES):
        raise ValueError(
            "is not of the form redis://[[user]:password@]host:port[/db] or "
            "redis+sentinel://[user:password@]host:port[,host:port…]/service[/db]"
        )


class Settings(BaseSettings):
    """Where everything is, and how fast it beats."""

    model_config = SettingsConfigDict(env_prefix="VCASGD_", extra="ignore", env_ignore_empty=True)

    home: Path = Field(default=Path("~/.vcasgd"), description="state of the embedded stack")
    cluster: str = Field(default="vcasgd", pattern=r"^[a-z0-9-]{1,40}$")
    ledger_url: SecretStr | None = Field(default=None, description="redis:// URL of the ledger")
    tensors_url: SecretStr | None = Field(
        default=None, description="redis:// URL of each store node's tensors server, in order"
    )
    job_users: bool = Field(default=True, description="Redis users that are bounded to a job")
    job_secret: SecretStr | None = Field(
        default=None, description="from which passwords and keys of workers are derived"
    )
    worker_key: SecretStr | None = Field(default=None, description="signs a worker's headers")
    cache_dir: Path | None = Field(default=None, description="where workers unpack code")
    storage_url: str | None = Field(default=None, description="file://, s3:// or gs:// prefix")
    pools: Path | None = Field(default=None, description="file of the pools; else only local")
    prices: Path | None = Field(default=None, description="file of prices that replace our own")
    price_seconds: float = Field(
        default=300.0, ge=1, description="between two looks at the prices of clouds"
    )
    compute_url: str | None = Field(default=None, description="of Google's API, if not its own")
    ray_address: str | None = None
    ray_token: SecretStr | None = Field(default=None, description="of the Ray cluster")
    ray_dir: Path | None = Field(
        default=None, description="short folder under which Ray's nodes on this machine keep theirs"
    )
    idle_seconds: float = Field(default=60.0, ge=0, description="after which a machine is given up")
    metadata_url: str | None = Field(default=None, description="the cloud's, on a worker's machine")
    metadata_kind: str | None = Field(default=None, description="aws, gcp or local")
    notice_file: Path | None = Field(default=None, description="where a shutdown is announced")
    api_url: str = "http://127.0.0.1:8700"
    api_port: int | None = Field(default=None, ge=0, le=65_535, description="0: any free one")
    token: SecretStr | None = None
    node: int = Field(default=0, ge=0, description="which store node a parameter server is on")
    node_url: SecretStr | None = Field(
        default=None, description="its tensors server as reached from inside the node"
    )
    store_nodes: int | None = Field(
        default=None, ge=1, le=64, description="store nodes of the embedded stack"
    )
    tensors_memory_mb: int | None = Field(
        default=None, ge=16, description="limit of the memory of each embedded tensors server"
    )
    replicas: int | None = Field(
        default=None, ge=0, le=1, description="of each server of the embedded stack"
    )
    redis_server: str | None = Field(default=None, description="path of a redis-server ≥ 7")
    heartbeat: float = Field(default=1.0, gt=0, le=60, description="seconds")
    package_limit_mb: float = Field(default=100.0, gt=0)
    local_capacity: int = Field(default=max(3, os.cpu_count() or 1), ge=0, le=1000)
    local_boot_seconds: float = Field(default=0.0, ge=0)
    local_notice_seconds: float = Field(default=5.0, ge=0)
    local_price_per_hour: float = Field(default=0.0, ge=0, description="USD, spot")
    local_on_demand_price_per_hour: float = Field(default=0.0, ge=0, description="USD")
    log_level: str = "INFO"
    log_format: Literal["text", "json"] = "text"

    @field_validator("ledger_url", "node_url")
    @classmethod
    def _is_redis_url(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            _check_redis_url(value.get_secret_value())
        return value

    @field_validator("tensors_url")
    @classmethod
    def _are_redis_urls(cls, value: SecretStr | None) -> SecretStr | None:
        for url in value.get_secret_value().split() if value else ():
            _check_redis_url(url)
        return value

    @field_validator("storage_url")
    @classmethod
    def _is_storage_url(cls, value: str | None) -> str | None:
        if value is not None and not _has_form(value, _STORAGE_SCHEMES):
            raise ValueError(f"{value} is not of the form file:///folder, s3://… or gs://…")
        return value

    @cached_property
    def home_path(self) -> Path:
        return self.home.expanduser().resolve()

    def secret(self, name: str) -> str:
        """A setting that holds a secret. Raises :class:`SpecError` where it is not set."""
        value = getattr(self, name)
        if value is None:
            raise SpecError(f"VCASGD_{name.upper()} is not set", field=f"VCASGD_{name.upper()}")
        return str(value.get_secret_value())

    def tensors_urls(self) -> list[str]:
        """The tensors servers, one for each store node. Raises :class:`SpecError`."""
        return self.secret("tensors_url").split()

    def own_tensors_url(self) -> str:
        """The tensors server beside which a parameter server works. Raises :class:`SpecError`."""
        if self.node_url is not None:
            return self.node_url.get_secret_value()
        urls = self.tensors_urls()
        if self.node >= len(urls):
            raise SpecError(
                f"VCASGD_NODE: there is no store node {self.node}; VCASGD_TENSORS_URL names "
                f"{len(urls)}, counted from 0",
                field="VCASGD_NODE",
            )
        return urls[self.node]

    def required(self, name: str) -> str:
        """A setting that this process can't do without. Raises :class:`SpecError`."""
        value = getattr(self, name)
        if value is None:
            raise SpecError(f"VCASGD_{name.upper()} is not set", field=f"VCASGD_{name.upper()}")
        return str(value)

    @property
    def metadata(self) -> dict[str, str]:
        """What :func:`vcasgd.fleet.machine.notices.notices_from_environment` reads."""
        told = {
            "VCASGD_METADATA_URL": self.metadata_url,
            "VCASGD_METADATA_KIND": self.metadata_kind,
            "VCASGD_NOTICE_FILE": self.notice_file,
        }
        return {name: str(value) for name, value in told.items() if value is not None}

    @property
    def lease_seconds(self) -> float:
        return self.heartbeat * LEASE_HEARTBEATS

    @property
    def stall_seconds(self) -> float:
        return self.lease_seconds * STALL_LEASES

    @property
    def patience_seconds(self) -> float:
        return self.lease_seconds * PATIENCE_LEASES


def log_format() -> str:
    """Of all settings this one is needed first: what is wrong with the others is logged."""
    return os.environ.get("VCASGD_LOG_FORMAT", "")


def load_settings() -> Settings:
    """From the environment. Raises :class:`SpecError` that names the wrong variable."""
    try:
        return Settings()
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = f"VCASGD_{'_'.join(str(part) for part in first['loc'])}".upper()
        message = first["msg"].removeprefix("Value error, ")
        raise SpecError(f"{name}: {message}", field=name) from None

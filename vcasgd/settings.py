"""Settings from the environment: every setting is ``VCASGD_<NAME>``.

No other module reads settings there. All timeouts of the platform derive from one setting,
``heartbeat``: lower it for faster detection of failures, and all others stay consistent.
"""

from __future__ import annotations

import os
import shutil
from functools import cached_property
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from vcasgd.container_limits import processors
from vcasgd.errors import SettingError
from vcasgd.limits import MIN_SECRET
from vcasgd.spec.problems import expected
from vcasgd.spec.values import DIGEST_PATTERN, described

#: Missed heartbeats that a lease survives. Enough for a garbage collection, swapping, or a restart
#: of the ledger; few enough that a dead worker is detected soon.
LEASE_HEARTBEATS = 8
#: Lease times without a step after which a worker stops renewing its lease.
STALL_LEASES = 15
#: Lease times for which a process retries to reach a server before it gives up.
PATIENCE_LEASES = 30


_STORE_SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel")
_STORAGE_SCHEMES = ("file", "s3", "gs")


def _has_form(url: str, schemes: tuple[str, ...]) -> bool:
    try:
        parts = urlsplit(url)
        if parts.scheme not in schemes:
            return False
        # a Sentinel URL can have several hosts
        hosts = [urlsplit(f"//{host}") for host in parts.netloc.rpartition("@")[2].split(",")]
        if parts.scheme.endswith("+sentinel") and not (parts.path.strip("/") and parts.netloc):
            return False
        return all(host.port is None or host.port > 0 for host in hosts)
    except ValueError:
        return False


def _check_redis_url(url: str) -> None:
    # the message does not contain the URL, because it holds a password
    if not _has_form(url, _STORE_SCHEMES):
        raise ValueError(
            "is not of the form redis://[[user]:password@]host:port[/db] or "
            "redis+sentinel://[user:password@]host:port[,host:port…]/service[/db]"
        )


#: Settings of the machine, and of no stack.
_OF_MACHINE = ("redis_server", "log_level", "local_gpus")


class Settings(BaseSettings):
    """Settings of every process of the platform."""

    model_config = SettingsConfigDict(env_prefix="VCASGD_", extra="ignore", env_ignore_empty=True)

    home: Path = Field(
        default=Path("~/.vcasgd"), description="Folder for the state of the embedded stack."
    )
    cluster: str = Field(
        default="vcasgd",
        pattern=described(r"^[a-z0-9-]{1,40}$", "up to 40 lowercase letters, digits, and dashes"),
        description="Name of the cluster, which tags its machines and its ledger.",
    )
    ledger_url: SecretStr | None = Field(
        default=None, description="URL of the ledger, such as redis://:password@host:6379/0."
    )
    tensors_url: SecretStr | None = Field(
        default=None, description="URLs of the tensors servers of all store nodes, in order."
    )
    job_users: bool = Field(
        default=True, description="Give workers their own Redis users, limited to a job."
    )
    job_secret: SecretStr | None = Field(
        default=None,
        min_length=MIN_SECRET,
        description="Secret that passwords and keys of workers are derived from.",
    )
    secrets_key: SecretStr | None = Field(
        default=None,
        min_length=32,
        description="Random text that the secrets of jobs are encrypted with, for the API and the "
        "controller.",
    )
    webhook_url: SecretStr | None = Field(
        default=None, description="URL to which the controller posts the events of all jobs."
    )
    webhook_secret: SecretStr | None = Field(
        default=None, min_length=MIN_SECRET, description="Secret that signs what is posted there."
    )
    webhook_events: str = Field(
        default="", description="Kinds of events to post, separated by spaces. Defaults to all."
    )
    tracker_env: Path | None = Field(
        default=None,
        description="File with variables of trackers, such as WANDB_API_KEY=…, one a line, for the "
        "processes that export jobs with track.",
    )
    worker_key: SecretStr | None = Field(
        default=None, description="Key that signs the headers of a worker's updates."
    )
    volunteer: bool = Field(
        default=False,
        description="True for a worker in a pool with trust: volunteer, which commits to its "
        "states.",
    )
    cache_dir: Path | None = Field(default=None, description="Folder where workers unpack code.")
    storage_url: str | None = Field(
        default=None, description="Prefix of object storage: file://, s3://, or gs://."
    )
    pools: Path | None = Field(
        default=None, description="File with the pools. Defaults to the pool local."
    )
    prices: Path | None = Field(
        default=None, description="File with prices that replace the built-in ones."
    )
    price_seconds: float = Field(
        default=300.0, ge=1, description="Seconds between two requests for the prices of clouds."
    )
    compute_url: str | None = Field(
        default=None, description="URL of the Compute Engine API, if not Google's own."
    )
    ray_address: str | None = Field(default=None, description="Address of the Ray cluster.")
    ray_token: SecretStr | None = Field(
        default=None, min_length=MIN_SECRET, description="Token of the Ray cluster."
    )
    ray_tls: bool = Field(
        default=False,
        description="Encrypt Ray's traffic, with certificates that follow from the token.",
    )
    ray_dir: Path | None = Field(
        default=None,
        description="Folder with a short path for the files of Ray nodes on this machine.",
    )
    idle_seconds: float = Field(
        default=60.0, ge=0, description="Seconds after which an idle machine is terminated."
    )
    hold_seconds: float = Field(
        default=120.0,
        ge=0,
        description="Seconds for which a job keeps a machine that another job has a claim to.",
    )
    orphan_seconds: float = Field(
        default=3600.0,
        ge=1,
        description="Seconds without a controller after which a cloud's machine ends itself.",
    )
    notice_file: Path | None = Field(
        default=None, description="File that announces an eviction when it appears."
    )
    api_url: str = Field(default="http://127.0.0.1:8700", description="URL of the API.")
    ca_file: Path | None = Field(
        default=None,
        description="PEM file with the certificate of the API, or of its authority.",
    )
    api_port: int | None = Field(
        default=None, ge=0, le=65_535, description="Port of the API; 0 for any free one."
    )
    token: SecretStr | None = Field(default=None, description="Token of the API.")
    api_socket: Path | None = Field(
        default=None, description="Unix socket where the API listens for the gateway."
    )
    join_port: int | None = Field(
        default=None,
        ge=0,
        le=65_535,
        description="Port of the gateway, where machines join over TLS; 0 for any free one. "
        "Without it, there is no gateway.",
    )
    join_host: str = Field(default="0.0.0.0", description="Address where the gateway listens.")
    join_url: str | None = Field(
        default=None, description="URL of the gateway as machines elsewhere reach it."
    )
    join_certificate: Path | None = Field(
        default=None,
        description="PEM file with the gateway's certificate and its chain. Without it, the stack "
        "makes its own.",
    )
    join_key: Path | None = Field(
        default=None, description="PEM file with the key of the gateway's certificate."
    )
    join_pin: str | None = Field(
        default=None,
        pattern=DIGEST_PATTERN,
        description="SHA-256 of the gateway's certificate, which tokens contain if its authority "
        "is not well known.",
    )
    node: int = Field(default=0, ge=0, description="Number of a parameter server's store node.")
    node_url: SecretStr | None = Field(
        default=None, description="URL of the tensors server from inside its store node."
    )
    store_nodes: int | None = Field(
        default=None, ge=1, le=64, description="Number of store nodes of the embedded stack."
    )
    ledger_memory_mb: int | None = Field(
        default=None, ge=64, description="Memory limit of the embedded ledger, in MiB."
    )
    tensors_memory_mb: int | None = Field(
        default=None, ge=16, description="Memory limit of each embedded tensors server, in MiB."
    )
    replicas: int | None = Field(
        default=None, ge=0, le=1, description="Replicas of each server of the embedded stack."
    )
    redis_server: Path | None = Field(
        default=None,
        description="Program redis-server, version 7 or newer, or valkey-server: a path, or a name "
        "on PATH.",
    )
    heartbeat: float = Field(
        default=1.0,
        gt=0,
        le=60,
        description="Seconds between heartbeats; all timeouts derive from it.",
    )
    keep_jobs: int = Field(
        default=200,
        ge=0,
        description="Jobs that have ended and stay in the ledger; the oldest are deleted first. "
        "Their checkpoints stay in the storage.",
    )
    package_limit_mb: float = Field(
        default=100.0, gt=0, description="Largest size of a package, in MB."
    )
    local_capacity: int = Field(
        default=max(3, int(processors())),
        ge=0,
        le=1000,
        description="Most machines of the pool local.",
    )
    local_gpus: int | None = Field(
        default=None,
        ge=0,
        le=1000,
        description="Most GPUs of this computer that the pool local uses; 0 for none. Defaults to "
        "all.",
    )
    local_boot_seconds: float = Field(
        default=0.0, ge=0, description="Simulated boot time of a local machine, in seconds."
    )
    local_notice_seconds: float = Field(
        default=5.0, ge=0, description="Seconds between the notice and the end of a local machine."
    )
    store_zone: str | None = Field(
        default=None, description="Zone of the store, for the price of traffic between zones."
    )
    monthly_budget_usd: float | None = Field(
        default=None,
        gt=0,
        description="Most that all machines cost in a calendar month (UTC), in USD; then jobs with "
        "billed machines are paused.",
    )
    local_price_per_hour: float = Field(
        default=0.0, ge=0, description="USD per hour of a local spot machine."
    )
    local_on_demand_price_per_hour: float = Field(
        default=0.0, ge=0, description="USD per hour of a local on-demand machine."
    )
    log_level: str = Field(default="INFO", description="Lowest level of log messages.")
    log_format: Literal["text", "json"] = Field(
        default="text", description="Format of log lines: text for people, json for programs."
    )

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
            raise ValueError(f"{value} is not of the form file:///folder, s3://…, or gs://…")
        return value

    @field_validator("redis_server")
    @classmethod
    def _on_path(cls, value: Path | None) -> Path | None:
        found = value and shutil.which(value.expanduser())
        return Path(found) if found else value

    @cached_property
    def home_path(self) -> Path:
        """The absolute path of ``home``."""
        return self.home.expanduser().resolve()

    def tensors_urls(self) -> list[str]:
        """Return the URLs of all tensors servers, by store node. Raises :class:`SettingError`."""
        return self.required("tensors_url").split()

    def own_tensors_url(self) -> str:
        """Return the URL of a parameter server's tensors server. Raises :class:`SettingError`."""
        if self.node_url is not None:
            return self.node_url.get_secret_value()
        urls = self.tensors_urls()
        if self.node >= len(urls):
            raise SettingError(
                f"VCASGD_NODE: there is no store node {self.node}; VCASGD_TENSORS_URL has "
                f"{len(urls)}, numbered from 0",
                field="VCASGD_NODE",
            )
        return urls[self.node]

    def required(self, name: str) -> str:
        """Return the value of a required setting. Raises :class:`SettingError` if it is not set."""
        value = getattr(self, name)
        if value is None:
            raise SettingError(f"VCASGD_{name.upper()} is not set", field=f"VCASGD_{name.upper()}")
        return str(value.get_secret_value() if isinstance(value, SecretStr) else value)

    @property
    def lease_seconds(self) -> float:
        """Duration of a lease."""
        return self.heartbeat * LEASE_HEARTBEATS

    @property
    def stall_seconds(self) -> float:
        """Time without a step after which a worker stops renewing its lease."""
        return self.lease_seconds * STALL_LEASES

    @property
    def patience_seconds(self) -> float:
        """Time for which a process retries to reach a server."""
        return self.lease_seconds * PATIENCE_LEASES


def log_format() -> str:
    """Return ``VCASGD_LOG_FORMAT``, which is needed before the other settings are checked."""
    return os.environ.get("VCASGD_LOG_FORMAT", "")


def separate_settings(**fields: Any) -> Settings:
    """Return the settings of a stack on this machine that shares nothing with the user's own.

    ``fields`` are settings that the caller chooses. Pools, servers, the name of the cluster, and
    all else have their defaults. Raises :class:`SettingError`.
    """
    defaults = {
        name: field.get_default(call_default_factory=True)
        for name, field in Settings.model_fields.items()
        if name not in _OF_MACHINE
    }
    return load_settings().model_copy(update={**defaults, "api_port": 0, **fields})


def load_settings() -> Settings:
    """Load the settings. Raises :class:`SettingError`, which names the invalid variable."""
    try:
        return Settings()
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = f"VCASGD_{'_'.join(str(part) for part in first['loc'])}".upper()
        raise SettingError(f"{name}: {expected(first)}", field=name) from None

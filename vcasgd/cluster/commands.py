"""The command lines of Ray's processes: the head's, and each machine's node."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from vcasgd.errors import ClusterError

#: Ray's label with the id of the instance, on nodes and on workers
INSTANCE_LABEL = "vcasgd.instance"
#: how long nodes and workers live on without a head. Training needs no head, so: long.
#: Bounded, so that machines of a cluster that is gone for good do not run for ever.
OUTAGE_SECONDS = 3600
#: missed checks until a node is dead
MISSED_CHECKS = 3
#: the object store carries nothing but Ray's own small messages; this is Ray's minimum
OBJECT_STORE_BYTES = 80_000_000
#: dead nodes and dead workers that the ledger keeps; Ray's default is a hundred thousand
REMEMBERED_DEAD = 1000
#: a Unix socket's path has at most 107 bytes, of which Ray's own part takes up to 70
TEMP_DIR_BYTES = 37

#: how the head learns the ledger's password; :func:`~.hook.start_hook` takes it from there
PASSWORD_VARIABLE = "RAY_REDIS_PASSWORD"

#: how Ray calls what redis-py has in a URL
_TLS_FILES = {
    "ssl_ca_certs": "RAY_REDIS_CA_CERT",
    "ssl_certfile": "RAY_REDIS_CLIENT_CERT",
    "ssl_keyfile": "RAY_REDIS_CLIENT_KEY",
}

_SECRETS = ("PASSWORD", "TOKEN", "URL")
_LEAN = {
    "RAY_usage_stats_enabled": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_event_stats": "0",
    "RAY_debug_dump_period_milliseconds": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_prestart_worker_first_driver": "0",
    # the kernel ends workers first as it is; Ray would by the use of the whole machine
    "RAY_memory_monitor_refresh_ms": "0",
    # there is nothing to drain: whoever gives notice speaks to the worker itself
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    # a worker sees all GPUs of its node without reserving them
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


@dataclass(frozen=True)
class Command:
    """A process to start; ``env`` is added to the parent's environment. Its ``repr`` is safe."""

    argv: tuple[str, ...]
    env: dict[str, str]

    def __repr__(self) -> str:
        shown = {name: _redacted(name, value) for name, value in self.env.items()}
        return f"Command(argv={self.argv!r}, env={shown!r})"


def _redacted(name: str, value: str) -> str:
    return "***" if any(mark in name.upper() for mark in _SECRETS) else value


def head_command(
    *,
    host: str,
    port: int,
    ledger_address: str,
    ledger_password: str | None,
    ledger_files: Mapping[str, str] = MappingProxyType({}),
    namespace: str,
    temp_dir: Path,
    heartbeat: float,
    token: str | None = None,
) -> Command:
    """The head: Ray's control service, its state in the ledger, and no room for workers.

    Blocks until it is killed; exits by itself when one of its parts or the ledger dies, also
    while it starts, or when the ledger can't be reached for a minute. The same command starts
    it again where it was. ``ledger_address`` is ``host:port``, behind ``rediss://`` where the
    ledger speaks TLS; ``ledger_files`` are then the options of its URL that name files.
    ``namespace`` separates clusters that share a ledger. Up after four seconds.
    Raises :class:`ClusterError` if ``temp_dir`` is too long.
    """
    flags = ["--head", "--port", str(port), "--node-ip-address", stable(host)]
    flags += ["--num-cpus", "0", "--num-gpus", "0", "--include-dashboard", "false", "--no-monitor"]
    env = {
        **_timing(heartbeat),
        "RAY_REDIS_ADDRESS": ledger_address,
        "RAY_external_storage_namespace": namespace,
        "RAY_START_HOOK": "vcasgd.cluster.hook.start_hook",
    }
    for option, variable in _TLS_FILES.items():
        if option in ledger_files:
            env[variable] = ledger_files[option]
    if ledger_password is not None:
        env[PASSWORD_VARIABLE] = ledger_password
    return _start(flags, env, temp_dir, token)


def node_command(
    *,
    address: str,
    instance_id: str,
    cpus: float,
    gpus: int = 0,
    temp_dir: Path | None,
    heartbeat: float,
    labels: Mapping[str, str],
    token: str | None = None,
) -> Command:
    """One machine's node, known to the cluster by ``instance_id``.

    Blocks until it is killed; waits some minutes for a head that is not there yet, and
    exits when the head was away for :data:`OUTAGE_SECONDS`. Several may run on one host,
    each with its own ``temp_dir``. Up after two seconds. All of it stays in the session of
    the process that it is started in, though not in its process group. Raises
    :class:`ClusterError` if ``temp_dir`` is too long.
    """
    host, _, port = address.rpartition(":")
    flags = ["--address", f"{stable(host)}:{port}"]
    flags += ["--num-cpus", f"{cpus:g}", "--num-gpus", str(gpus)]
    flags += ["--labels", _label_list({**labels, INSTANCE_LABEL: instance_id})]
    if _is_loopback(host):
        flags += ["--node-ip-address", stable(host)]
    env = _timing(heartbeat)
    # otherwise Ray gives one thread to a worker that reserves no processor
    env["OMP_NUM_THREADS"] = str(max(1, int(cpus)))
    if gpus == 0:
        env["CUDA_VISIBLE_DEVICES"] = ""
    return _start(flags, env, temp_dir, token)


def _start(
    flags: list[str], env: dict[str, str], temp_dir: Path | None, token: str | None
) -> Command:
    argv = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *flags]
    argv += ["--disable-usage-stats", "--include-log-monitor", "false"]
    argv += ["--object-store-memory", str(OBJECT_STORE_BYTES)]
    # Ray's fixed range would make several nodes of one host fight for the same ports
    argv += ["--min-worker-port", "0", "--max-worker-port", "0"]
    if temp_dir is not None:
        argv += ["--temp-dir", _short(temp_dir)]
    return Command(tuple(argv), {**_LEAN, **env, **authentication(token)})


def _short(temp_dir: Path) -> str:
    if len(os.fsencode(temp_dir)) > TEMP_DIR_BYTES:
        raise ClusterError(
            f"{temp_dir} is too long to hold Ray's sockets",
            remedy=f"use a folder whose path has at most {TEMP_DIR_BYTES} bytes",
        )
    return str(temp_dir)


def _label_list(labels: Mapping[str, str]) -> str:
    return ",".join(f"{name}={value}" for name, value in labels.items())


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.")


def stable(host: str) -> str:
    """Ray replaces ``127.0.0.1`` by an outward address, which a laptop may lose any minute.

    It leaves the other loopback addresses as they are.
    """
    return "127.0.0.2" if _is_loopback(host) else host


def authentication(token: str | None) -> dict[str, str]:
    if token is None:
        return {"RAY_AUTH_MODE": "disabled"}
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}


def _timing(heartbeat: float) -> dict[str, str]:
    """Ray's own clocks. A refused connection counts at once, silence after two heartbeats."""
    beat = max(1, round(heartbeat * 1000))
    return {
        "RAY_health_check_initial_delay_ms": str(MISSED_CHECKS * beat),
        "RAY_health_check_period_ms": str(beat),
        "RAY_health_check_timeout_ms": str(2 * beat),
        "RAY_health_check_failure_threshold": str(MISSED_CHECKS),
        "RAY_gcs_redis_heartbeat_interval_milliseconds": str(beat),
        "RAY_gcs_rpc_server_reconnect_timeout_s": str(OUTAGE_SECONDS),
        "RAY_maximum_gcs_destroyed_actor_cached_count": str(REMEMBERED_DEAD),
        "RAY_maximum_gcs_dead_node_cached_count": str(REMEMBERED_DEAD),
    }

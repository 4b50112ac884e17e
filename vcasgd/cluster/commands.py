"""Command lines of Ray's processes, and certificates for the traffic between them."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vcasgd.errors import ClusterError, SpecError
from vcasgd.local_files import write_private

#: Ray label of nodes with the id of their machine.
MACHINE_LABEL = "vcasgd.machine"
#: Seconds that nodes and workers survive without a head. Long, because training needs no head;
#: bounded, so that the machines of a cluster that was lost for good do not run forever.
OUTAGE_SECONDS = 3600
#: Missed health checks after which a node counts as dead.
MISSED_CHECKS = 3
#: Size of the object store: Ray's minimum, because it holds only Ray's own small messages.
OBJECT_STORE_BYTES = 80_000_000
#: Dead nodes and dead workers that Ray keeps in the ledger; its default is 100,000.
REMEMBERED_DEAD = 1000
#: Longest temporary folder: a socket's path has at most 107 bytes, and Ray adds up to 70.
TEMP_DIR_BYTES = 37

#: Modules that the processes of a machine find imported. The first optimizer of a process would
#: import the second one, which takes as long as torch itself. The others are those that Ray needs,
#: which can't be imported itself: it then reads the environment.
WORKER_MODULES = (
    *("vcasgd.worker.main", "torch._dynamo"),
    *("requests", "jsonschema", "msgpack", "google.protobuf.message"),
)
#: Variable with the socket of the process that a node's workers are forks of.
FORKS_VARIABLE = "VCASGD_FORKS"
#: Set to 1 for processes that encrypt Ray's traffic.
TLS_VARIABLE = "VCASGD_RAY_TLS"
#: Fewest characters of a token. Anyone can test guesses with a certificate that Ray shows.
MIN_TOKEN = 32
#: Loopback addresses under which Ray knows a machine; see :func:`stable`.
LOOPBACK = ("localhost", "127.0.0.1")
#: Module that starts Ray's processes.
START = "vcasgd.cluster.start"
#: Passes the ledger's password to the head; :mod:`~vcasgd.cluster.ray_node` removes it from there.
PASSWORD_VARIABLE = "RAY_REDIS_PASSWORD"

_SECRETS = ("PASSWORD", "TOKEN", "URL")
_LEAN = {
    "RAY_usage_stats_enabled": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_event_stats": "0",
    "RAY_debug_dump_period_milliseconds": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_prestart_worker_first_driver": "0",
    # Nodes have no resources to report and no objects to collect; the defaults are 0.1 s.
    "RAY_raylet_report_resources_period_milliseconds": "1000",
    "RAY_raylet_check_gc_period_milliseconds": "10000",
    "RAY_object_manager_timer_freq_ms": "1000",
    "RAY_kill_idle_workers_interval_ms": "1000",
    # The kernel already kills workers first; Ray would judge by the memory of the whole machine.
    "RAY_memory_monitor_refresh_ms": "0",
    # Nothing to drain: workers get notices from their machine.
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    # A worker uses all GPUs of its node without reserving them.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


@dataclass(frozen=True)
class Command:
    """A process to start. ``env`` extends the parent's environment; ``repr`` hides secrets."""

    argv: tuple[str, ...]
    env: dict[str, str]

    def __repr__(self) -> str:
        secret = {name for name in self.env if any(mark in name.upper() for mark in _SECRETS)}
        shown = {name: "***" if name in secret else each for name, each in self.env.items()}
        return f"Command(argv={self.argv!r}, env={shown!r})"


def node_command(
    *,
    address: str,
    machine_id: str,
    cpus: float,
    gpus: int = 0,
    temp_dir: Path | None,
    heartbeat: float,
    preload: Sequence[str] = WORKER_MODULES,
    token: str | None = None,
    tls: bool = False,
) -> Command:
    """Return the command of one machine's node, which the cluster knows by ``machine_id``.

    The process runs until it is killed. It waits some minutes for a head that does not run yet, and
    exits after the head was unavailable for :data:`OUTAGE_SECONDS`. Several nodes can run on one
    host, each with its own ``temp_dir``. It is ready after about two seconds. All its processes
    stay in the session of their parent, but not in its process group. Workers find the modules
    ``preload`` imported. Raises :class:`ClusterError` if ``temp_dir`` is too long.
    """
    host, _, port = address.rpartition(":")
    flags = ["--address", f"{stable(host)}:{port}"]
    flags += ["--num-cpus", f"{cpus:g}", "--num-gpus", str(gpus)]
    flags += ["--label", f"{MACHINE_LABEL}={machine_id}"]
    for module in preload:
        flags += ["--preload", module]
    if _is_loopback(host):
        flags += ["--node-ip-address", stable(host)]
    env = confinement(host)
    # Otherwise Ray limits a worker that reserves no processor to one thread.
    env["OMP_NUM_THREADS"] = str(max(1, int(cpus)))
    if gpus == 0:
        env["CUDA_VISIBLE_DEVICES"] = ""
    return ray_command(flags, env, temp_dir, heartbeat, token, tls=tls)


def ray_command(
    flags: list[str],
    env: Mapping[str, str],
    temp_dir: Path | None,
    heartbeat: float,
    token: str | None,
    *,
    tls: bool,
) -> Command:
    """Return the command that starts Ray's processes of one machine with these flags.

    Raises :class:`ClusterError` if ``temp_dir`` is too long.
    """
    argv = [sys.executable, "-m", START, *flags]
    argv += ["--object-store-memory", str(OBJECT_STORE_BYTES)]
    if temp_dir is not None:
        argv += ["--temp-dir", _short(temp_dir)]
    access = authentication(token, tls=tls)
    return Command(tuple(argv), {**_LEAN, **_timing(heartbeat), **env, **access})


def _short(temp_dir: Path) -> str:
    if len(os.fsencode(temp_dir)) > TEMP_DIR_BYTES:
        raise ClusterError(
            f"{temp_dir} is too long to hold Ray's sockets",
            remedy=f"use a folder whose path has at most {TEMP_DIR_BYTES} bytes",
        )
    return str(temp_dir)


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.")


def stable(host: str) -> str:
    """Return the host, as an address for a loopback address."""
    return "127.0.0.1" if _is_loopback(host) else host


def confinement(host: str) -> dict[str, str]:
    """Return the environment variables that keep the Ray of a single machine on its loopback.

    Otherwise Ray replaces ``127.0.0.1`` with an outward address, which a laptop can lose at any
    time, and listens on all interfaces. The name of the variable is about other systems, but its
    effect is the same on Linux.
    """
    return {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"} if _is_loopback(host) else {}


def authentication(token: str | None, *, tls: bool = False) -> dict[str, str]:
    """Return the environment variables for authentication with ``token``, and encryption."""
    if token is None:
        return {"RAY_AUTH_MODE": "disabled"}
    encryption = {TLS_VARIABLE: "1"} if tls else {}
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, **encryption}


def _timing(heartbeat: float) -> dict[str, str]:
    """Return Ray's timeouts.

    A refused connection counts as missed at once, no answer after two heartbeats.
    """
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


# -- TLS ------------------------------------------------------------------------------------------


def own_address(address: str) -> str:
    """Return the address of this machine that reaches ``address``, which is ``host:port``."""
    host, _, port = address.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))
        return str(probe.getsockname()[0])


def use_tls(token: str, host: str, folder: Path | None = None) -> None:
    """Set Ray's variables for a process that Ray knows as ``host``, so that it encrypts.

    Ray's processes show each other certificates of one authority. Its key is derived from the
    token, which all of them have, and which allows running code on every machine anyway.
    ``folder`` is for the files that they name. Without one, they are in memory, where only this
    process finds them. Raises :class:`SpecError` if the token is short.
    """
    if len(token) < MIN_TOKEN:
        raise SpecError(
            f"VCASGD_RAY_TOKEN: has {len(token)} characters; with VCASGD_RAY_TLS it needs"
            f" at least {MIN_TOKEN}, chosen at random",
            field="VCASGD_RAY_TOKEN",
        )
    from vcasgd.encryption import Authority

    authority = Authority(token, "vcasgd ray")
    certificate, key = authority.issue("ray", sorted({host, *LOOPBACK}))
    content = {"CA_CERT": authority.certificate(), "SERVER_CERT": certificate, "SERVER_KEY": key}
    for name, pem in content.items():
        os.environ[f"RAY_TLS_{name}"] = _stored(name, pem, folder)
    os.environ["RAY_USE_TLS"] = "1"


def _stored(name: str, content: bytes, folder: Path | None) -> str:
    """Return the path of the content, which is kept as long as the folder or the process is."""
    if folder is None:
        file = os.memfd_create(name)
        os.write(file, content)
        return f"/proc/self/fd/{file}"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / f"{name.lower()}.pem"
    write_private(path, content)
    return str(path)

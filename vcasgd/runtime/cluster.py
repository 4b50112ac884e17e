"""Ray, and all that the rest of the package knows of it.

Ray keeps the list of machines, places one worker on each and hosts its process. Tensors
and control data go through the two Redis servers, so a dead head costs nothing but the
ability to place new workers until it is back.

What dies, and what follows (``heartbeat`` is the platform's one clock):

* **Head** (control service and its raylet). Nodes and workers go on for
  :data:`OUTAGE_SECONDS`. Started again with the same command it reads its state from the
  ledger and finds them. A driver does not survive it: see :class:`Cluster`.
* **Ledger.** The control service ends itself within about three heartbeats plus three seconds
  and takes the head with it; start the ledger, then the head.
* **Node.** Known as dead after about four heartbeats when its process was killed, nine when
  the machine fell silent. Its worker dies within a second or two of its raylet.

Ray speaks unencrypted, on all interfaces: its ports belong behind a firewall.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from vcasgd.errors import ClusterError

T = TypeVar("T")

#: Ray's label with the id of the instance, on nodes and on workers
INSTANCE_LABEL = "vcasgd.instance"
#: how long nodes and workers live on without a head. Training needs no head, so: long.
#: Bounded, so that machines of a cluster that is gone for good do not run for ever.
OUTAGE_SECONDS = 3600
#: the object store carries nothing but Ray's own small messages; this is Ray's minimum
OBJECT_STORE_BYTES = 80_000_000
#: missed checks until a node is dead
MISSED_CHECKS = 3
#: Ray puts sockets under its folder; a Unix socket's path has at most 107 bytes, of which
#: Ray's own part takes this many
SOCKET_SUFFIX = 70
#: dead nodes and workers that the control service remembers; Ray's default grows for ever
REMEMBERED_DEAD = 1000

#: a head that says nothing for this long is dead to :meth:`Cluster.healthy`
PING_SECONDS = 3.0

_LEAN = {
    "RAY_usage_stats_enabled": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_event_stats": "0",
    "RAY_debug_dump_period_milliseconds": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_prestart_worker_first_driver": "0",
    # the kernel kills the worker first as it is; Ray would kill it on the whole machine's use
    "RAY_memory_monitor_refresh_ms": "0",
}
_PASSWORD = "RAY_REDIS_PASSWORD"
_SECRET_MARKS = ("PASSWORD", "TOKEN", "URL", "SECRET", "KEY")


@dataclass(frozen=True)
class Command:
    """A process to start: ``env`` is added to the parent's environment. ``repr`` is safe to log."""

    argv: tuple[str, ...]
    env: dict[str, str]

    def __repr__(self) -> str:
        shown = {name: _redacted(name, value) for name, value in self.env.items()}
        return f"Command(argv={self.argv!r}, env={shown!r})"


def _redacted(name: str, value: str) -> str:
    return "***" if any(mark in name.upper() for mark in _SECRET_MARKS) else value


def head_command(
    *,
    host: str,
    port: int,
    ledger_address: str,
    ledger_password: str | None,
    namespace: str,
    temp_dir: Path,
    heartbeat: float,
) -> Command:
    """The head: Ray's control service with its state in the ledger, and no room for workers.

    Blocks until it is killed, or exits when any of its parts or the ledger dies; run the
    same command again to go on where it was. ``namespace`` separates clusters that share a
    ledger. Ready after about four seconds. Raises :class:`ClusterError` if ``temp_dir`` is
    too long for sockets.
    """
    flags = ["--head", "--port", str(port), "--node-ip-address", host]
    flags += ["--num-cpus", "0", "--num-gpus", "0", "--include-dashboard", "false", "--no-monitor"]
    env = {
        **_timing(heartbeat),
        "RAY_REDIS_ADDRESS": ledger_address,
        "RAY_external_storage_namespace": namespace,
        "RAY_START_HOOK": "vcasgd.runtime.cluster.start_hook",
    }
    if ledger_password is not None:
        env[_PASSWORD] = ledger_password
    return _start(flags, env, temp_dir)


def node_command(
    *,
    address: str,
    instance_id: str,
    cpus: float,
    gpus: int = 0,
    temp_dir: Path | None,
    heartbeat: float,
    labels: Mapping[str, str],
) -> Command:
    """One machine's node, known to the cluster by ``instance_id``.

    Blocks until it is killed; exits when the head has been away for
    :data:`OUTAGE_SECONDS`. Several may run on one host if each has its own ``temp_dir``.
    Ready after about two seconds. Raises :class:`ClusterError` if ``temp_dir`` is too long.
    """
    tags = {**labels, INSTANCE_LABEL: instance_id}
    flags = ["--address", address, "--num-cpus", f"{cpus:g}", "--num-gpus", str(gpus)]
    flags += ["--labels", ",".join(f"{name}={value}" for name, value in tags.items())]
    # else Ray gives a worker that reserves no processor one thread
    env = {**_timing(heartbeat), "OMP_NUM_THREADS": str(max(1, int(cpus)))}
    return _start(flags, env, temp_dir)


def _start(flags: list[str], env: dict[str, str], temp_dir: Path | None) -> Command:
    argv = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *flags]
    argv += ["--disable-usage-stats", "--include-log-monitor", "false"]
    argv += ["--object-store-memory", str(OBJECT_STORE_BYTES)]
    # Ray's fixed range would make several nodes of one host fight for the same ports
    argv += ["--min-worker-port", "0", "--max-worker-port", "0"]
    if temp_dir is not None:
        argv += ["--temp-dir", str(_short(temp_dir))]
    return Command(tuple(argv), {**_LEAN, **env})


def _short(temp_dir: Path) -> Path:
    if len(os.fsencode(temp_dir)) + SOCKET_SUFFIX > 107:
        raise ClusterError(
            f"{temp_dir} is too long to hold Ray's sockets",
            remedy=f"use a folder of at most {107 - SOCKET_SUFFIX} bytes",
        )
    return temp_dir


def _timing(heartbeat: float) -> dict[str, str]:
    """Ray's own clocks. A refused connection counts at once, silence after two heartbeats."""
    beat = max(1, round(heartbeat * 1000))
    return {
        "RAY_health_check_initial_delay_ms": str(3 * beat),
        "RAY_health_check_period_ms": str(beat),
        "RAY_health_check_timeout_ms": str(2 * beat),
        "RAY_health_check_failure_threshold": str(MISSED_CHECKS),
        "RAY_gcs_redis_heartbeat_interval_milliseconds": str(beat),
        "RAY_gcs_rpc_server_reconnect_timeout_s": str(OUTAGE_SECONDS),
        "RAY_maximum_gcs_destroyed_actor_cached_count": str(REMEMBERED_DEAD),
        "RAY_maximum_gcs_dead_node_cached_count": str(REMEMBERED_DEAD),
    }


def start_hook(parameters: Any, head: bool) -> None:
    """What Ray calls inside ``ray start``: no client proxy, no password on a command line."""
    parameters.ray_client_server_port = None
    _forget_last_life(parameters.temp_dir)
    password = os.environ.pop(_PASSWORD, None)
    if head and password is not None:
        parameters.redis_password = password
        _hide(password)


def _forget_last_life(temp_dir: str | None) -> None:
    """Ray refuses to start a head again while nodes of this host still name its address.

    It takes them for the head itself, but only if this file says that there was one.
    """
    if temp_dir is not None:
        Path(temp_dir, "ray_current_cluster").unlink(missing_ok=True)


def _hide(password: str) -> None:
    """Ray writes the password into the arguments of its children, where ``ps`` shows it.

    Only the control service needs it and can read its flags from the environment; the
    others are started without.
    """
    from ray._private import services

    start = services.start_ray_process

    def start_hidden(command: list[str], *arguments: Any, **options: Any) -> Any:
        flag = f"--redis_password={password}"
        if flag in command:
            updates = options.get("env_updates") or {}
            options["env_updates"] = {**updates, "FLAGS_redis_password": password}
        shown = ["--fromenv=redis_password" if part == flag else part for part in command]
        shown = [part.replace(password, "") for part in shown]
        return start(shown, *arguments, **options)

    services.start_ray_process = start_hidden


class State(StrEnum):
    """Of a worker. ``dead`` is final: Ray starts none a second time."""

    PENDING = "pending"
    ALIVE = "alive"
    DEAD = "dead"


@dataclass(frozen=True)
class Node:
    """A machine as Ray sees it. The head has no ``instance_id``."""

    node_id: str
    instance_id: str | None
    alive: bool
    host: str


@dataclass(frozen=True)
class WorkerState:
    """A worker as Ray sees it; ``reason`` says why it is dead, as far as Ray knows."""

    name: str
    instance_id: str | None
    state: State
    reason: str = ""


class Host:
    """What a worker's process runs: ``entry(**arguments)``, and then its own end.

    The entry runs beside Ray's own thread, so that Ray can kill the process at any time.
    The process exits 0 when the entry returns, 1 when it raises.
    """

    def __init__(self, entry: str, arguments: dict[str, Any], env: dict[str, str]) -> None:
        # before the entry's imports: libraries read their settings when they are loaded
        os.environ.update(env)
        threading.Thread(target=_run, args=(entry, arguments), name="entry", daemon=True).start()


def _run(entry: str, arguments: dict[str, Any]) -> None:
    code = 1
    try:
        module, function = entry.split(":")
        getattr(importlib.import_module(module), function)(**arguments)
        code = 0
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except BaseException:  # noqa: BLE001 - the last frame of this process: report and end
        traceback.print_exc()
    finally:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Cluster:
    """The controller's view of Ray. Every call is bounded by the ``timeout`` of :meth:`connect`.

    One per process. It is bound to one life of the head: after the head died
    :meth:`healthy` is ``False``, every call raises :class:`ClusterError`, and the way on is
    to end this process and start it again. Workers do not notice.
    """

    def __init__(self, address: str, namespace: str, timeout: float) -> None:
        self._address = address
        self._namespace = namespace
        self._timeout = timeout
        self._head = ""

    @classmethod
    def connect(cls, address: str, namespace: str, timeout: float) -> Cluster:
        """Joins the cluster whose head has a node on this host.

        Raises :class:`ClusterError` within ``timeout`` seconds if there is none.
        """
        cluster = cls(address, namespace, timeout)
        cluster._bounded("connect", cluster._join)
        return cluster

    def nodes(self) -> list[Node]:
        """Every node of the cluster, the head too, and recently dead ones."""
        return self._bounded("list the nodes", _nodes)

    def workers(self) -> dict[str, WorkerState]:
        """The newest worker of each name. Dead ones stay listed for a while."""
        return self._bounded("list the workers", _workers)

    def start_worker(
        self,
        instance_id: str,
        name: str,
        entry: str,
        arguments: dict[str, Any],
        env: dict[str, str],
    ) -> None:
        """Asks for a worker that runs ``entry`` (``module:function``) on that instance.

        Idempotent: nothing happens while a worker of that name is pending or alive. Returns
        before the worker is up, usually within 50 ms. It outlives this process, is never
        restarted, and never moves. Raises :class:`ClusterError` if the instance has no live
        node, or if ``arguments`` are not JSON.
        """
        _check_json(arguments)
        self._bounded(
            f"start worker {name}", lambda: self._place(instance_id, name, entry, arguments, env)
        )

    def stop_worker(self, name: str) -> None:
        """Kills the worker. Idempotent; silent if there is none. Returns before it is dead."""
        self._bounded(f"stop worker {name}", lambda: self._kill(name))

    def healthy(self) -> bool:
        """Whether the head that we joined still answers. Never raises."""
        try:
            return self._head in bounded("check the head", _alive, min(self._timeout, PING_SECONDS))
        except ClusterError:
            return False

    def close(self) -> None:
        """Leaves the cluster; workers stay. Idempotent, never raises."""
        with contextlib.suppress(ClusterError):
            self._bounded("leave", _ray().shutdown)

    def _join(self) -> None:
        _ray().init(
            address=self._address,
            namespace=self._namespace,
            log_to_driver=False,
            configure_logging=False,
            logging_level=logging.ERROR,
        )
        self._head = _ray().get_runtime_context().get_node_id()

    def _place(
        self,
        instance_id: str,
        name: str,
        entry: str,
        arguments: dict[str, Any],
        env: dict[str, str],
    ) -> None:
        ray = _ray()
        node = next((n for n in _nodes() if n.alive and n.instance_id == instance_id), None)
        if node is None:
            raise ClusterError(f"instance {instance_id} has no live node")
        ray.remote(Host).options(
            name=name,
            namespace=self._namespace,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=0,
            num_cpus=0,
            scheduling_strategy=ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
                node.node_id, soft=False
            ),
            _labels={INSTANCE_LABEL: instance_id},
        ).remote(entry, arguments, env)

    def _kill(self, name: str) -> None:
        ray = _ray()
        with contextlib.suppress(ValueError):
            ray.kill(ray.get_actor(name, namespace=self._namespace), no_restart=True)

    def _bounded(self, what: str, call: Callable[[], T]) -> T:
        return bounded(what, call, self._timeout)


def bounded(what: str, call: Callable[[], T], timeout: float) -> T:
    """``call()``, or :class:`ClusterError` after ``timeout`` seconds.

    Ray waits for a dead head inside its library, where nothing interrupts it; such a call is
    left behind in its thread, and the process is expected to end soon.
    """
    answers: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((True, call()))
        except BaseException as error:  # noqa: BLE001 - carried over to the caller
            answers.put((False, error))

    threading.Thread(target=run, name=f"ray: {what}", daemon=True).start()
    try:
        done, answer = answers.get(timeout=timeout)
    except queue.Empty:
        raise ClusterError(f"can't {what}: no answer from Ray in {timeout:g} s") from None
    if done:
        return answer  # type: ignore[no-any-return]
    if isinstance(answer, ClusterError):
        raise answer
    raise ClusterError(f"can't {what}: {answer}") from answer


def _ray() -> Any:
    import ray
    import ray.util.scheduling_strategies

    return ray


def _nodes() -> list[Node]:
    return [_node(row) for row in _ray().nodes()]


def _alive() -> set[str]:
    return {node.node_id for node in _nodes() if node.alive}


def _node(row: dict[str, Any]) -> Node:
    instance_id = row["Labels"].get(INSTANCE_LABEL)
    return Node(row["NodeID"], instance_id, bool(row["Alive"]), row["NodeManagerAddress"])


def _workers() -> dict[str, WorkerState]:
    from ray._private.state import state
    from ray.core.generated.gcs_pb2 import ActorTableData

    accessor = state._connect_and_get_accessor()
    rows = [ActorTableData.FromString(row) for row in accessor.get_actor_table(None, None)]
    rows.sort(key=lambda row: row.timestamp)
    return {row.name: _worker(row) for row in rows if row.name}


def _worker(row: Any) -> WorkerState:
    names = {row.ALIVE: State.ALIVE, row.DEAD: State.DEAD}
    reason = row.death_cause.actor_died_error_context.error_message
    instance_id = row.labels.get(INSTANCE_LABEL)
    return WorkerState(row.name, instance_id, names.get(row.state, State.PENDING), reason)


def _check_json(arguments: dict[str, Any]) -> None:
    try:
        json.dumps(arguments)
    except (TypeError, ValueError) as error:
        raise ClusterError(f"a worker's arguments must be JSON: {error}") from error

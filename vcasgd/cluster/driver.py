"""The driver's view of Ray: machines and the workers on them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from vcasgd.cluster.commands import MACHINE_LABEL, authentication, confinement, stable
from vcasgd.cluster.host import Host
from vcasgd.cluster.notices import published
from vcasgd.cluster.tls import VARIABLE
from vcasgd.cluster.tls import use as use_tls
from vcasgd.errors import ClusterError
from vcasgd.fleet.machine.notices import Notice

T = TypeVar("T")

log = logging.getLogger(__name__)

#: Seconds without an answer after which :meth:`Cluster.nodes` reports the head as lost.
PING_SECONDS = 3.0
#: Ray's resource that only the head's node has.
HEAD_RESOURCE = "node:__internal_head__"


class ActorState(StrEnum):
    """State of a worker. ``dead`` is final: Ray restarts none."""

    PENDING = "pending"
    ALIVE = "alive"
    DEAD = "dead"


@dataclass(frozen=True)
class Node:
    """A machine in Ray. The head's node has no ``machine_id``."""

    node_id: str
    machine_id: str | None
    alive: bool
    host: str


@dataclass(frozen=True)
class WorkerState:
    """A worker in Ray. ``reason``: why it died, if Ray knows."""

    name: str
    machine_id: str | None
    state: ActorState
    reason: str = ""


class Cluster:
    """Connection to Ray that lists machines and starts and stops workers.

    Use one per process, from any thread. Every call ends within the ``timeout`` of :meth:`connect`
    and raises nothing but :class:`ClusterError`. The connection belongs to one process of the head:
    when that dies, :meth:`nodes` raises for good. Exit then and let the supervisor
    restart the process: it would not find a new head reliably, and Ray exits it with code 1 after a
    minute without a head. A normal exit takes six seconds longer while the head is dead. Workers
    are not affected.
    """

    def __init__(self, namespace: str, timeout: float, head: str) -> None:
        self._namespace = namespace
        self._timeout = timeout
        self._head = head
        self._lost = False

    @classmethod
    def connect(
        cls,
        address: str,
        namespace: str,
        timeout: float,
        token: str | None = None,
        *,
        tls: bool = False,
    ) -> Cluster:
        """Join the cluster as a driver, on the host of its head.

        Waits for the head if it does not run yet; otherwise takes a second. Raises
        :class:`ClusterError` within ``timeout`` seconds.
        """
        name, _, port = address.rpartition(":")
        host, deadline = stable(name), time.monotonic() + timeout
        _await_port(host, int(port), deadline)
        env = {**authentication(token, tls=tls), **confinement(name)}
        head = _bounded(
            "connect",
            deadline - time.monotonic(),
            lambda: _join(f"{host}:{port}", namespace, env, deadline),
        )
        _restore_signal_handlers()
        return cls(namespace, timeout, head)

    def nodes(self) -> list[Node]:
        """Return all nodes, with the head's and recently dead ones. Takes milliseconds.

        Raises :class:`ClusterError` within :data:`PING_SECONDS` if the head that was joined died.
        """
        if not self._lost:
            with contextlib.suppress(ClusterError):
                nodes = _bounded("list the nodes", min(self._timeout, PING_SECONDS), _nodes)
                if any(node.alive and node.node_id == self._head for node in nodes):
                    return nodes
        self._lost = True
        raise ClusterError("Ray's head was lost")

    def workers(self) -> dict[str, WorkerState]:
        """Return the workers by name, with recently dead ones. Takes milliseconds.

        Of several with one name, it is the one that is alive, else the last.
        """
        return _bounded("list the workers", self._timeout, lambda: _workers(self._namespace))

    def notices(self) -> dict[str, Notice]:
        """Return the eviction notices that machines have received, by machine."""
        return _bounded("read the notices", self._timeout, published)

    def start_worker(
        self,
        machine_id: str,
        name: str,
        entry: str,
        arguments: dict[str, Any],
        env: dict[str, str],
    ) -> None:
        """Start a worker on a machine; its process runs ``entry`` (``module:function``).

        Returns within milliseconds. The worker is ready after one or two seconds; see
        :meth:`workers`. Idempotent: does nothing while a worker of that name is pending or alive.
        The worker outlives this process, is never restarted, never moves, and is dead when
        ``entry(**arguments)`` has returned. ``env`` and ``arguments`` are stored in the ledger.
        Raises :class:`ClusterError` if the machine has no node that is alive, or if ``arguments``
        are not JSON.
        """
        _check_json(arguments)

        def place() -> None:
            options = {**_pinned(machine_id), "name": name, "namespace": self._namespace}
            _ray().remote(Host).options(**options).remote(entry, arguments, env)

        _bounded(f"start worker {name}", self._timeout, place)

    def stop_worker(self, name: str) -> None:
        """Kill a worker, if it exists. Idempotent. Returns before the worker is dead."""

        def kill() -> None:
            with contextlib.suppress(ValueError):
                actor = _ray().get_actor(name, namespace=self._namespace)
                _ray().kill(actor, no_restart=True)

        _bounded(f"stop worker {name}", self._timeout, kill)

    def close(self) -> None:
        """Leave the cluster; workers stay. Idempotent, also if the head is dead."""
        with contextlib.suppress(ClusterError):
            _bounded("leave", self._timeout, _ray().shutdown)


def _restore_signal_handlers() -> None:
    """Restore the signal handlers; those of Ray's library end the process at once."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.getsignal(number))


def _bounded(what: str, timeout: float, call: Callable[[], T]) -> T:
    """Return ``call()``, or raise :class:`ClusterError` after ``timeout`` seconds.

    Ray waits for a dead head inside its library, where nothing can interrupt it. Such a call stays
    in its thread, which ends with the process at the latest.
    """
    answers: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((call(), None))
        except BaseException as error:  # noqa: BLE001 - raised again in the calling thread
            answers.put((None, error))

    threading.Thread(target=run, name=f"ray: {what}", daemon=True).start()
    try:
        answer, error = answers.get(timeout=timeout)
    except queue.Empty:
        raise ClusterError(f"can't {what}: Ray does not answer in {timeout:g} s") from None
    if error is None:
        return answer  # type: ignore[return-value]
    if isinstance(error, ClusterError):
        raise error
    raise ClusterError(f"can't {what}: {error}") from error


def _ray() -> Any:
    """Return Ray, imported late: the import takes a second, and most of the package needs none."""
    import ray

    return ray


def _join(address: str, namespace: str, access: dict[str, str], deadline: float) -> str:
    """Join the cluster and return the id of the head's node."""
    os.environ.update(access)
    if os.environ.pop(VARIABLE, None) == "1":
        # The driver is on the machine of the head.
        use_tls(access["RAY_AUTH_TOKEN"], address.rpartition(":")[0])
    # A call after the end of the cluster must not start a new cluster.
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    _silence_ray()
    while (node_id := _attach(address, namespace)) is None:
        if time.monotonic() > deadline:
            raise ClusterError("the head has no node yet")
        time.sleep(0.2)
    return node_id


def _attach(address: str, namespace: str) -> str | None:
    """Join; return None if Ray chose another node of this host because the head's is not ready."""
    _ray().init(address=address, namespace=namespace, log_to_driver=False, configure_logging=False)
    node_id = str(_ray().get_runtime_context().get_node_id())
    if any(row["NodeID"] == node_id and HEAD_RESOURCE in row["Resources"] for row in _rows()):
        return node_id
    _ray().shutdown()
    return None


def _silence_ray() -> None:
    """Log what Ray would print about nodes and workers on a driver's standard output."""
    from ray._private import worker

    worker.print_to_stdstream = lambda data, **_: log.debug("ray: %s", " ".join(data["lines"]))
    # Ray logs advice about signal handlers, which do not apply here.
    logging.getLogger("ray").setLevel(logging.ERROR)


def _await_port(host: str, port: int, deadline: float) -> None:
    """Wait until the port is open; Ray itself would retry past the deadline and end the process."""
    while (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=left):
            return
        time.sleep(min(0.1, left))
    raise ClusterError(f"can't connect: no process listens on {host}:{port}")


def _pinned(machine_id: str) -> dict[str, Any]:
    """Return the options of a worker that may run only on this machine's node.

    The node is fixed by its id and not by the machine's label, because Ray fails at once if the
    node has died meanwhile, but would wait forever for a label.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    alive = (node for node in _nodes() if node.alive and node.machine_id == machine_id)
    node = next(alive, None)
    if node is None:
        raise ClusterError(f"machine {machine_id} has no node that is alive")
    return {
        "lifetime": "detached",
        "get_if_exists": True,
        "max_restarts": 0,
        "num_cpus": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node.node_id, soft=False),
        "_labels": {MACHINE_LABEL: machine_id},
    }


def _nodes() -> list[Node]:
    return [
        Node(
            node_id=row["NodeID"],
            machine_id=row["Labels"].get(MACHINE_LABEL),
            alive=bool(row["Alive"]),
            host=row["NodeManagerAddress"],
        )
        for row in _rows()
    ]


def _rows() -> list[dict[str, Any]]:
    return list(_ray().nodes())


def _workers(namespace: str) -> dict[str, WorkerState]:
    """Read the workers from the control service; Ray's public listing needs its dashboard."""
    from ray._private.state import state as control
    from ray.core.generated import gcs_pb2

    table = control._connect_and_get_accessor().get_actor_table(None, None)
    rows = [gcs_pb2.ActorTableData.FromString(row) for row in table]  # type: ignore[attr-defined]
    rows = [row for row in rows if row.name and row.ray_namespace == namespace]
    rows.sort(key=lambda row: (row.state != row.DEAD, row.timestamp))
    return {row.name: _worker(row) for row in rows}


def _worker(row: Any) -> WorkerState:
    states = {row.ALIVE: ActorState.ALIVE, row.DEAD: ActorState.DEAD}
    # Ray appends a page about common causes.
    reason = row.death_cause.actor_died_error_context.error_message.partition(" Some common")[0]
    machine_id = row.labels.get(MACHINE_LABEL)
    return WorkerState(row.name, machine_id, states.get(row.state, ActorState.PENDING), reason)


def _check_json(arguments: dict[str, Any]) -> None:
    try:
        json.dumps(arguments)
    except (TypeError, ValueError) as error:
        raise ClusterError(f"a worker's arguments must be JSON: {error}") from error

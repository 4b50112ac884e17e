"""The driver's side of Ray: which machines there are, and which workers on them."""

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

from vcasgd.cluster.commands import INSTANCE_LABEL, authentication, stable
from vcasgd.cluster.host import Host
from vcasgd.errors import ClusterError

T = TypeVar("T")

log = logging.getLogger(__name__)

#: a head that says nothing for this long is dead to :meth:`Cluster.healthy`
PING_SECONDS = 3.0
#: Ray's mark on the head's node, and on no other
HEAD_RESOURCE = "node:__internal_head__"


class ActorState(StrEnum):
    """Of a worker. ``dead`` is final: Ray starts none a second time."""

    PENDING = "pending"
    ALIVE = "alive"
    DEAD = "dead"


@dataclass(frozen=True)
class Node:
    """A machine as Ray sees it. The head's has no ``instance_id``."""

    node_id: str
    instance_id: str | None
    alive: bool
    host: str


@dataclass(frozen=True)
class WorkerState:
    """A worker as Ray sees it. ``reason``: why it is dead, as far as Ray knows."""

    name: str
    instance_id: str | None
    state: ActorState
    reason: str = ""


class Cluster:
    """The driver's view of Ray: which machines there are, and which workers on them.

    One per process, usable from any thread. Every call ends within the ``timeout`` given to
    :meth:`connect` and raises nothing but :class:`ClusterError`. It is bound to one life of
    the head: when the head dies, :meth:`healthy` turns ``False`` for good. End the process
    then, and have it started again: it would not learn of a new head reliably, and Ray ends
    it with exit code 1 when the head stays away for a minute. An ordinary exit takes six
    seconds longer while the head is dead. The workers notice nothing of all this.
    """

    def __init__(self, namespace: str, timeout: float, head: str) -> None:
        self._namespace = namespace
        self._timeout = timeout
        self._head = head
        self._lost = False

    @classmethod
    def connect(
        cls, address: str, namespace: str, timeout: float, token: str | None = None
    ) -> Cluster:
        """Joins the cluster as a driver, on the host of its head.

        Waits for the head if it is not there yet; takes a second if it is. Raises
        :class:`ClusterError` within ``timeout``.
        """
        name, _, port = address.rpartition(":")
        host, deadline = stable(name), time.monotonic() + timeout
        _await_port(host, int(port), deadline)
        head = _bounded(
            "connect",
            deadline - time.monotonic(),
            lambda: _join(f"{host}:{port}", namespace, token, deadline),
        )
        _take_signals_back()
        return cls(namespace, timeout, head)

    def nodes(self) -> list[Node]:
        """Every node, the head's too, and the dead ones for a while. Takes milliseconds."""
        return _bounded("list the nodes", self._timeout, _nodes)

    def workers(self) -> dict[str, WorkerState]:
        """By name; of several with one name the living, else the last. Takes milliseconds.

        Dead ones stay listed for a while.
        """
        return _bounded("list the workers", self._timeout, lambda: _workers(self._namespace))

    def start_worker(
        self,
        instance_id: str,
        name: str,
        entry: str,
        arguments: dict[str, Any],
        env: dict[str, str],
    ) -> None:
        """Asks for a worker on that instance; its process runs ``entry`` (``module:function``).

        Returns within milliseconds, before the worker is up: that takes one or two seconds,
        and shows in :meth:`workers`. Idempotent: nothing happens while one of that name is
        pending or alive. The worker outlives this process, is never restarted, never moves,
        and is dead when ``entry(**arguments)`` has returned. Raises :class:`ClusterError` if
        the instance has no living node or ``arguments`` are not JSON. ``env`` and
        ``arguments`` are kept in the ledger.
        """
        _check_json(arguments)

        def place() -> None:
            options = {**_pinned(instance_id), "name": name, "namespace": self._namespace}
            _ray().remote(Host).options(**options).remote(entry, arguments, env)

        _bounded(f"start worker {name}", self._timeout, place)

    def stop_worker(self, name: str) -> None:
        """Kills the worker. Idempotent; silent if there is none. Returns before it is dead."""

        def kill() -> None:
            with contextlib.suppress(ValueError):
                actor = _ray().get_actor(name, namespace=self._namespace)
                _ray().kill(actor, no_restart=True)

        _bounded(f"stop worker {name}", self._timeout, kill)

    def healthy(self) -> bool:
        """Whether the head that we joined still lives; known within :data:`PING_SECONDS`."""
        self._lost = self._lost or not self._sees_head()
        return not self._lost

    def _sees_head(self) -> bool:
        try:
            nodes = _bounded("reach the head", min(self._timeout, PING_SECONDS), _nodes)
        except ClusterError:
            return False
        return any(node.alive and node.node_id == self._head for node in nodes)

    def close(self) -> None:
        """Leaves the cluster; workers stay. Idempotent; silent if the head is dead."""
        with contextlib.suppress(ClusterError):
            _bounded("leave", self._timeout, _ray().shutdown)


def _take_signals_back() -> None:
    """Ray's library replaces the process's handlers, below Python, by ones that end it at once."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.getsignal(number))


def _bounded(what: str, timeout: float, call: Callable[[], T]) -> T:
    """``call()``, or :class:`ClusterError` after ``timeout`` seconds.

    Ray waits for a dead head deep in its library, where nothing can interrupt it. Such a
    call is left behind in its thread, which ends with the process at the latest.
    """
    answers: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((call(), None))
        except BaseException as error:  # noqa: BLE001 - raised again where it belongs
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
    """Imported late: it takes a second, and most of the package does without."""
    import ray

    return ray


def _join(address: str, namespace: str, token: str | None, deadline: float) -> str:
    """Returns the id of the head's node."""
    os.environ.update(authentication(token))
    # a call after the end of the cluster must not start a cluster of its own
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    _quiet()
    while (node_id := _attach(address, namespace)) is None:
        if time.monotonic() > deadline:
            raise ClusterError("the head has no node yet")
        time.sleep(0.2)
    return node_id


def _attach(address: str, namespace: str) -> str | None:
    """``None`` if Ray took another node of this host because the head's is not up yet."""
    _ray().init(address=address, namespace=namespace, log_to_driver=False, configure_logging=False)
    node_id = str(_ray().get_runtime_context().get_node_id())
    if any(row["NodeID"] == node_id and HEAD_RESOURCE in row["Resources"] for row in _rows()):
        return node_id
    _ray().shutdown()
    return None


def _quiet() -> None:
    """Ray prints news of nodes and workers on a driver's standard output; we log them."""
    from ray._private import worker

    worker.print_to_stdstream = lambda data, **_: log.debug("ray: %s", " ".join(data["lines"]))
    # it advises us to handle signals in its way
    logging.getLogger("ray").setLevel(logging.ERROR)


def _await_port(host: str, port: int, deadline: float) -> None:
    """Ray would go on trying after our time is up, and end this process in the end."""
    while (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=left):
            return
        time.sleep(min(0.1, left))
    raise ClusterError(f"can't connect: nobody listens on {host}:{port}")


def _pinned(instance_id: str) -> dict[str, Any]:
    """Options of a worker on that instance's node and on no other.

    Pinned to the node, not to the instance's label: Ray gives up at once when the node has
    died meanwhile, and would wait for ever for a label.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    living = (node for node in _nodes() if node.alive and node.instance_id == instance_id)
    node = next(living, None)
    if node is None:
        raise ClusterError(f"instance {instance_id} has no living node")
    return {
        "lifetime": "detached",
        "get_if_exists": True,
        "max_restarts": 0,
        "num_cpus": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node.node_id, soft=False),
        "_labels": {INSTANCE_LABEL: instance_id},
    }


def _nodes() -> list[Node]:
    return [
        Node(
            node_id=row["NodeID"],
            instance_id=row["Labels"].get(INSTANCE_LABEL),
            alive=bool(row["Alive"]),
            host=row["NodeManagerAddress"],
        )
        for row in _rows()
    ]


def _rows() -> list[dict[str, Any]]:
    return list(_ray().nodes())


def _workers(namespace: str) -> dict[str, WorkerState]:
    """Straight from the control service: Ray's public listing needs its dashboard."""
    from ray._private.state import state as control
    from ray.core.generated import gcs_pb2

    table = control._connect_and_get_accessor().get_actor_table(None, None)
    rows = [gcs_pb2.ActorTableData.FromString(row) for row in table]  # type: ignore[attr-defined]
    rows = [row for row in rows if row.name and row.ray_namespace == namespace]
    rows.sort(key=lambda row: (row.state != row.DEAD, row.timestamp))
    return {row.name: _worker(row) for row in rows}


def _worker(row: Any) -> WorkerState:
    states = {row.ALIVE: ActorState.ALIVE, row.DEAD: ActorState.DEAD}
    # Ray goes on for a page about common causes
    reason = row.death_cause.actor_died_error_context.error_message.partition(" Some common")[0]
    instance_id = row.labels.get(INSTANCE_LABEL)
    return WorkerState(row.name, instance_id, states.get(row.state, ActorState.PENDING), reason)


def _check_json(arguments: dict[str, Any]) -> None:
    try:
        json.dumps(arguments)
    except (TypeError, ValueError) as error:
        raise ClusterError(f"a worker's arguments must be JSON: {error}") from error

"""The driver's view of Ray: its nodes, and the process on each that runs the machine's workers."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from vcasgd.cluster.commands import (
    FORKS_VARIABLE,
    MACHINE_LABEL,
    TLS_VARIABLE,
    authentication,
    confinement,
    stable,
    use_tls,
)
from vcasgd.errors import ClusterError
from vcasgd.fleet.notices import NOTICE_FILE_VARIABLE, FileNotices
from vcasgd.machine.workers import WorkerProcess, WorkerSet
from vcasgd.schemas.fleet import WorkerOrder
from vcasgd.threads import DaemonThreads

T = TypeVar("T")

log = logging.getLogger(__name__)

#: Seconds without an answer after which :meth:`Cluster.nodes` reports the head as lost.
PING_SECONDS = 3.0
#: Seconds that :meth:`Cluster.exchange` waits for machines; one that is late reports later.
ANSWER_SECONDS = 0.5
#: Ray's resource that only the head's node has.
HEAD_RESOURCE = "node:__internal_head__"


class _Node:
    """The runner of one node, and the last call of it."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        #: The call whose answer is awaited, and the orders in it.
        self.call: Any = None
        self.sent: str | None = None
        #: Orders that the runner has confirmed.
        self.confirmed: str | None = None

    def send(self, orders: str) -> None:
        """Call it, with the orders unless it has them. Calls arrive in order."""
        self.sent, has_them = orders, orders == self.confirmed
        self.call = self.actor.follow.remote(None if has_them else orders)
        if not has_them:
            # It has them as soon as it answers, and perhaps although its answer is lost.
            self.confirmed = None


class Cluster:
    """Connection to Ray that lists machines, sends orders to them, and collects their reports.

    Use one per process. Every call ends within the ``timeout`` of :meth:`connect` and raises
    nothing but :class:`ClusterError`. The connection belongs to one process of the head: when that
    dies, :meth:`nodes` raises for good. Exit then and let the supervisor restart the process: it
    would not find a new head reliably, and Ray exits it with code 1 after a minute without a head.
    A normal exit takes six seconds longer while the head is dead. Workers are not affected.
    """

    def __init__(self, namespace: str, timeout: float, head: str) -> None:
        self._namespace = namespace
        self._timeout = timeout
        self._head = head
        self._lost = False
        #: Ray's nodes that are alive, by machine.
        self._ids: dict[str, str] = {}
        self._nodes: dict[str, _Node] = {}

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

    def nodes(self) -> frozenset[str]:
        """Return the machines whose node is alive. Takes milliseconds.

        Raises :class:`ClusterError` within :data:`PING_SECONDS` if the head that was joined died.
        """
        if not self._lost:
            with contextlib.suppress(ClusterError):
                rows = _bounded("list the nodes", min(self._timeout, PING_SECONDS), _alive)
                if any(row["NodeID"] == self._head for row in rows):
                    labels = {row["NodeID"]: row["Labels"].get(MACHINE_LABEL) for row in rows}
                    self._ids = {name: node for node, name in labels.items() if name is not None}
                    return frozenset(self._ids)
        self._lost = True
        raise ClusterError("Ray's head was lost")

    def exchange(self, orders: Mapping[str, str]) -> dict[str, str | None]:
        """Send the orders of nodes that are alive, and return the reports that have arrived.

        A report is None if the process that runs the machine's workers has died, and its workers
        with it; the next call starts another one. See
        :meth:`~vcasgd.cluster.driver.Runner.follow`.
        """
        self._nodes = {name: node for name, node in self._nodes.items() if name in orders}
        return _bounded("reach the machines", self._timeout, lambda: self._exchange(orders))

    def send(self, machine: str, orders: str) -> None:
        """Send the orders of one node at once. Returns within milliseconds."""
        if (node := self._nodes.get(machine)) is not None:
            _bounded(f"send orders to {machine}", self._timeout, lambda: node.send(orders))

    def _exchange(self, orders: Mapping[str, str]) -> dict[str, str | None]:
        for machine, text in orders.items():
            if machine not in self._nodes:
                self._nodes[machine] = _Node(self._runner(machine))
            node = self._nodes[machine]
            if node.call is None or node.sent != text:
                node.send(text)
        calls = {node.call: name for name, node in self._nodes.items()}
        if not calls:
            return {}
        ready, _ = _ray().wait([*calls], num_returns=len(calls), timeout=ANSWER_SECONDS)
        reports: dict[str, str | None] = {}
        for call in ready:
            self._answer(calls[call], reports)
        return reports

    def _answer(self, machine: str, reports: dict[str, str | None]) -> None:
        """Add the report of a machine whose call has ended, if it has one."""
        node, errors = self._nodes[machine], _ray().exceptions
        call, node.call = node.call, None
        try:
            reports[machine] = str(_ray().get(call))
            node.confirmed = node.sent
        except errors.ActorUnavailableError as error:
            log.warning("%s: %s", machine, error)
        except errors.RayActorError as error:
            log.warning("%s: the process of its workers ended: %s", machine, error)
            reports[machine] = None
            del self._nodes[machine]
        except errors.RayError as error:
            log.warning("%s: it can't follow its orders: %s", machine, error)

    def _runner(self, machine: str) -> Any:
        """Return the runner of a machine; start it unless it runs.

        It may run only on this node, outlives this process, and is never restarted.
        """
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        # By the node's id and not the machine's label: Ray fails at once if the node has died
        # meanwhile, but would wait forever for a label.
        place = NodeAffinitySchedulingStrategy(self._ids[machine], soft=False)
        options: dict[str, Any] = {
            "name": f"runner.{machine}",
            "namespace": self._namespace,
            "lifetime": "detached",
            "get_if_exists": True,
            "max_restarts": 0,
            "num_cpus": 0,
            "scheduling_strategy": place,
        }
        return _ray().remote(Runner).options(**options).remote()

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
    future = DaemonThreads(1, f"ray: {what}").submit(call)
    wait([future], timeout)
    if not future.done():
        raise ClusterError(f"can't {what}: Ray does not answer in {timeout:g} s")
    error = future.exception()
    if error is None:
        answer: T = future.result()
        return answer
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
    if os.environ.pop(TLS_VARIABLE, None) == "1":
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
    if any(row["NodeID"] == node_id and HEAD_RESOURCE in row["Resources"] for row in _alive()):
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


def _alive() -> list[dict[str, Any]]:
    return [row for row in _ray().nodes() if row["Alive"]]


#: Most letters of the reason for which a worker has ended.
MAX_REASON_LENGTH = 500
#: Start of the variables of Ray, which a worker must not use.
_RAY = "RAY_"


class Runner:
    """Ray actor, one on each node. Its workers end with it, and it ends with the node.

    They are forks of the process that the node has for that (:mod:`vcasgd.cluster.start`).
    """

    def __init__(self) -> None:
        self._forks = Path(os.environ[FORKS_VARIABLE])
        self._folder = self._forks.with_name("workers")
        self._folder.mkdir(exist_ok=True)
        notice_file = os.environ.get(NOTICE_FILE_VARIABLE)
        self._notices = FileNotices(Path(notice_file)) if notice_file else None
        self._workers = WorkerSet(self._make)

    def _make(self, order: WorkerOrder) -> WorkerProcess:
        env = {name: value for name, value in os.environ.items() if not name.startswith(_RAY)}
        return WorkerProcess(order, self._folder, {**env, **order.env}, self._forks)

    def follow(self, orders: str | None) -> str:
        """Run the workers of these orders, or go on; return the report of the machine.

        Both are JSON: a list of :class:`~vcasgd.schemas.fleet.WorkerOrder`, and a
        :class:`~vcasgd.store.ledger.machines.MachineReport`.
        """
        if orders is not None:
            self._workers.follow(WorkerOrder(**row) for row in json.loads(orders))
        self._workers.update()
        notice = self._notices and self._notices.poll()
        workers = self._workers.report(MAX_REASON_LENGTH)
        report = {"at": time.time(), "workers": workers, "notice": notice and asdict(notice)}
        return json.dumps(report)

"""Provider of machines that are pods of a Kubernetes cluster, and join through the gateway."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

from vcasgd.errors import FleetError
from vcasgd.fleet.pools import KubernetesPoolSpec
from vcasgd.fleet.providers.base import Machine, MachineState
from vcasgd.fleet.providers.join.provider import JoinedFleet
from vcasgd.fleet.providers.kubernetes.client import KubernetesClient
from vcasgd.fleet.providers.kubernetes.manifest import (
    CLUSTER_LABEL,
    LAUNCH_LABEL,
    PodName,
    launch_name,
    pod,
)
from vcasgd.fleet.providers.kubernetes.pods import Pod, parse_pods
from vcasgd.fleet.providers.pooled import LaunchOrder, OrderedProvider

#: Machines of one launch, each of which is a request.
MAX_LAUNCHED = 50
#: Seconds for which pods that have ended stay, so that a person can read their logs.
KEPT_SECONDS = 600.0
#: Ended pods that are deleted at a time.
MAX_CLEANED = 20


class KubernetesProvider(OrderedProvider[KubernetesPoolSpec]):
    """Provider for pools of one namespace."""

    name = "kubernetes"
    max_terminated = 20

    def __init__(
        self, cluster: str, pools: Sequence[KubernetesPoolSpec], joined: JoinedFleet
    ) -> None:
        super().__init__(cluster, pools, joined)
        template = pools[0].template
        self._kubernetes = KubernetesClient(template.namespace, template.context)

    def _launch(self, order: LaunchOrder[KubernetesPoolSpec]) -> list[str]:
        """See the contract. The names of the pods derive from the token.

        A pod that has ended is listed for some minutes, unless it was deleted.
        """
        self._check_kind(order)
        spec, launch = order.spec, launch_name(self._cluster, order.spec.name, order.token)
        if granted := [str(each.machine) for each in self._listed({LAUNCH_LABEL: launch})]:
            return sorted(granted)
        created: list[str] = []
        for index in range(min(order.count, MAX_LAUNCHED)):
            machine = PodName(spec.name, launch, index)
            try:
                self._kubernetes.create(pod(order, self._cluster, machine), spec.name)
            except FleetError:
                if created:
                    break  # The next launch meets the error first.
                raise
            created.append(str(machine))
        return created

    def machines(self) -> list[Machine]:
        """See the contract. Deletes pods that ended some minutes ago."""
        pods = self._listed()
        self._boot_errors = {str(each.machine): each.problem for each in pods}
        self._clean(each for each in pods if each.ended_at is not None)
        leaving = self._joined.leaving()
        return [
            self._machine(
                str(each.machine),
                each.machine.pool,
                each.state,
                launched_at=each.created_at,
                notice_at=each.taken_at,
                host=each.node,
                zone=self._zone(each),
                left_at=leaving.get(str(each.machine)),
            )
            for each in pods
            if each.state is not MachineState.GONE
        ]

    def terminate(self, *machine_ids: str) -> None:
        """See the contract. Ignores pods of others."""
        self._delete(machine_ids)

    def evict(self, machine_id: str, notice_seconds: float | None = None) -> None:
        """Delete a pod, as a drain of its node does. The agent gets SIGTERM, and leaves."""
        self._delete([machine_id], notice_seconds)

    def kill(self, machine_id: str) -> None:
        """See the contract."""
        self._delete([machine_id], 0)

    def close(self) -> None:
        """See the contract."""
        self._kubernetes.close()

    def _listed(self, labels: dict[str, str] | None = None) -> list[Pod]:
        """Return the cluster's pods, also those that have ended."""
        selected = {CLUSTER_LABEL: self._cluster, **(labels or {})}
        found, after = parse_pods(self._kubernetes.page(selected))
        while after:
            more, after = parse_pods(self._kubernetes.page(selected, after))
            found += more
        return found

    def _delete(self, machines: Iterable[str], grace_seconds: float | None = None) -> None:
        wanted, failed = set(machines), None
        for each in self._listed():
            leaves = each.taken_at is not None and grace_seconds != 0
            if str(each.machine) not in wanted or leaves or each.state is MachineState.GONE:
                continue
            try:
                self._kubernetes.delete(str(each.machine), grace_seconds)
            except FleetError as error:
                failed = error
        if failed is not None:
            raise failed

    def _clean(self, ended: Iterable[Pod]) -> None:
        before = time.time() - KEPT_SECONDS
        old = [each for each in ended if each.ended_at is not None and each.ended_at < before]
        with suppress(FleetError):  # They cost nothing.
            for each in old[:MAX_CLEANED]:
                self._kubernetes.delete(str(each.machine))

    def _zone(self, one: Pod) -> str | None:
        """Return the zone of a pod; None if its label names none of the pool's."""
        spec = self._pools.get(one.machine.pool)
        return one.zone if spec and one.zone in spec.zones else None

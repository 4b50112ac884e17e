"""Provider of machines that are pods of a Kubernetes cluster, and join through the gateway."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

from vcasgd.errors import FleetError, InvalidRequest, NoCapacity
from vcasgd.fleet.pools import KubernetesPoolSpec
from vcasgd.fleet.providers.base import Boot, Machine, MachineState, Offer, narrowed
from vcasgd.fleet.providers.join.provider import JoinedFleet
from vcasgd.fleet.providers.kubernetes.client import KubernetesClient
from vcasgd.fleet.providers.kubernetes.manifest import pod
from vcasgd.fleet.providers.kubernetes.names import (
    CLUSTER_LABEL,
    LAUNCH_LABEL,
    PodName,
    launch_name,
)
from vcasgd.fleet.providers.kubernetes.pods import Pod, parse_pods

#: Machines of one launch, each of which is a request.
MAX_LAUNCHED = 50
#: Seconds for which pods that have ended stay, so that a person can read their logs.
KEPT_SECONDS = 600.0
#: Ended pods that are deleted at a time.
MAX_CLEANED = 20


class KubernetesProvider:
    """Implementation of :class:`~vcasgd.fleet.providers.base.Provider` for pools of one namespace.

    ``joined`` says which agents leave, before Kubernetes knows it.
    """

    name = "kubernetes"
    max_terminated = 20

    def __init__(
        self, cluster: str, pools: Sequence[KubernetesPoolSpec], joined: JoinedFleet
    ) -> None:
        self._cluster = cluster
        self._pools = {pool.name: pool for pool in pools}
        self._joined = joined
        template = pools[0].template
        self._kubernetes = KubernetesClient(template.namespace, template.context)
        self._problems: dict[str, str | None] = {}

    def offers(self, pool: str) -> list[Offer]:
        """See the contract. Kubernetes has no prices; that of the pools file counts."""
        spec = self._pool(pool)
        price = spec.template.price_per_hour
        return [
            Offer(
                pool=pool,
                zone=zone,
                machine_type=kind,
                spot=spec.spot,
                price_per_hour=price,
                on_demand_price_per_hour=price,
                cpus=spec.cpus or 1.0,
                gpus=spec.gpus or 0,
                as_of=time.time(),
                source="the pools file",
            )
            for zone in spec.zones
            for kind in spec.machine_types
        ]

    def launch(
        self,
        pool: str,
        count: int,
        boot: Boot,
        token: str,
        *,
        zones: Sequence[str] | None = None,
        machine_types: Sequence[str] | None = None,
        spot: bool | None = None,
    ) -> list[str]:
        """See the contract. The names of the pods derive from the token.

        A pod that has ended is listed for some minutes, unless it was deleted.
        """
        spec = self._pool(pool)
        some_zones = narrowed(spec.zones, zones, pool, "zone")
        some_types = narrowed(spec.machine_types, machine_types, pool, "machine type")
        if spot is not None and spot is not spec.spot:
            kind = "spot" if spec.spot else "not spot"
            raise NoCapacity(f"{pool}: its nodes are {kind}", pool=pool)
        launch = launch_name(self._cluster, pool, token)
        if granted := [str(each.machine) for each in self._listed({LAUNCH_LABEL: launch})]:
            return sorted(granted)
        created: list[str] = []
        for index in range(min(count, MAX_LAUNCHED)):
            machine = PodName(pool, launch, index)
            manifest = pod(spec, self._cluster, machine, boot.argv, some_zones, some_types)
            try:
                self._kubernetes.create(manifest, pool)
            except FleetError:
                if created:
                    break  # The next launch meets the error first.
                raise
            created.append(str(machine))
        return created

    def capacity(self, pool: str) -> int | None:
        """See the contract."""
        return self._pool(pool).max_machines

    def machines(self) -> list[Machine]:
        """See the contract. Deletes pods that ended some minutes ago."""
        pods = self._listed()
        self._problems = {str(each.machine): each.problem for each in pods}
        self._clean(each for each in pods if each.ended_at is not None)
        leaving = self._joined.leaving()
        present = (each for each in pods if each.state is not MachineState.GONE)
        return [self._machine(each, leaving.get(str(each.machine))) for each in present]

    def boot_error(self, machine_id: str) -> str | None:
        """Return why a container doesn't start or has failed, as last listed."""
        return self._problems.get(machine_id)

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

    def _machine(self, one: Pod, left_at: float | None) -> Machine:
        spec = self._pools.get(one.machine.pool)
        price = spec.template.price_per_hour if spec else 0.0
        return Machine(
            id=str(one.machine),
            pool=one.machine.pool,
            state=one.state if left_at is None else MachineState.LEAVING,
            launched_at=one.created_at,
            notice_at=one.taken_at if left_at is None else left_at,
            host=one.node,
            price_per_hour=price,
            spot=spec.spot if spec else True,
            zone=_zone(spec, one.zone),
            machine_type=spec.machine_types[0] if spec else "",
            on_demand_price_per_hour=price,
        )

    def _pool(self, name: str) -> KubernetesPoolSpec:
        if name not in self._pools:
            raise InvalidRequest(
                f"there is no pool {name!r}",
                remedy=f"known pools: {', '.join(self._pools)}",
                pool=name,
            )
        return self._pools[name]


def _zone(spec: KubernetesPoolSpec | None, zone: str | None) -> str:
    """Return the zone of a pod; the pool's first one if the pod's label names none of them."""
    if spec is None:
        return ""
    return zone if zone in spec.zones else spec.zones[0]

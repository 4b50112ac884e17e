"""Provider for Compute Engine, with ``bulkInsert``.

A launch tries each zone with each type until one has machines. Names of machines, which are their
ids, derive from the launch's token. Each machine has the labels ``vcasgd-cluster``,
``vcasgd-pool``, and ``vcasgd-launch`` from its start. docs/security.md lists the permissions that
the controller needs.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any

from google.cloud import compute_v1

from vcasgd.errors import (
    CloudUnavailable,
    FleetError,
    InvalidRequest,
    NoCapacity,
    Throttled,
)
from vcasgd.fleet.pools import GcpPoolSpec
from vcasgd.fleet.prices import PriceTable
from vcasgd.fleet.providers.base import (
    Boot,
    Connection,
    LaunchOrder,
    Provider,
    offer_of,
    one_line,
    refusal_of,
)
from vcasgd.fleet.providers.gcp_calls import (
    BOOT_ERROR_ATTRIBUTE,
    CLUSTER_LABEL,
    CODES,
    LAUNCH_LABEL,
    STATES,
    USER_DATA_KEY,
    attempt,
    call,
    client_options,
    is_spot,
    labelled,
    last,
    launch_label,
    launch_resource,
    limits,
    machine_of,
    priced,
    request_id,
    template_path,
)
from vcasgd.fleet.providers.gcp_prices import catalog_prices
from vcasgd.fleet.providers.user_data import boot_environment, combined, worker_script
from vcasgd.schemas.costs import Offer
from vcasgd.schemas.fleet import Machine

#: Time limit for all zones and types of a launch; later results appear in the listing.
LAUNCH_SECONDS = 25.0
#: Google's documented limit on one value of the metadata.
USER_DATA_BYTES = 262_144
#: Machines in one page of a listing.
PAGE = 500


class Clients:
    """Clients of Compute Engine, which share credentials. Raises Google's own errors."""

    def __init__(self, url: str | None) -> None:
        options = client_options(url)
        self.machines = compute_v1.InstancesClient(**options)
        self.operations = compute_v1.ZoneOperationsClient(**options)
        self.everywhere = compute_v1.InstanceTemplatesClient(**options)
        self.regional = compute_v1.RegionInstanceTemplatesClient(**options)


class GcpProvider(Provider[GcpPoolSpec]):
    """Provider for pools of one project.

    A launch returns with Google's result, usually within some seconds and at most after half a
    minute. Machines are listed at once, and run half a minute later.
    """

    name = "gcp"
    #: Compute Engine deletes one machine a call.
    max_terminated = 20

    def __init__(
        self,
        cluster: str,
        pools: Sequence[GcpPoolSpec],
        table: PriceTable,
        *,
        url: str | None = None,
        page: int = PAGE,
    ) -> None:
        """Create the provider. Raises :class:`~vcasgd.errors.SpecError` if a type has no price.

        ``url`` replaces Google's own. A plain HTTP URL is called without credentials.
        """
        super().__init__(cluster, pools)
        self._project = pools[0].template.project
        self._url = url
        self._table = table
        self._page = page
        #: Zones of the machines, as last listed.
        self._zones: dict[str, str] = {}
        for pool in pools:
            for kind in pool.machine_types:
                priced(pool, kind, table)
        self._clients = Connection(lambda: attempt(lambda: Clients(url)))

    def offers(self, pool: str) -> list[Offer]:
        read = partial(catalog_prices, list(self._pools.values()), self._table, self._url)
        self._table.refresh(read, "price catalog of Google")
        return super().offers(pool)

    def _offer(self, spec: GcpPoolSpec, zone: str, kind: str) -> Offer:
        """Return an offer. A type costs the same in all zones of a region."""
        listed, price = priced(spec, kind, self._table)
        return offer_of(spec, zone, kind, price, listed)

    def _launch(self, order: LaunchOrder[GcpPoolSpec]) -> list[str]:
        """See the contract. Repeat a launch with the same zones and types."""
        pool = order.spec.name
        if granted := self._granted(order.token):
            return granted
        metadata = self._metadata(order.spec, order.boot)
        deadline = time.monotonic() + LAUNCH_SECONDS
        refusal: FleetError = NoCapacity(f"{pool}: no zone responded in time")
        for zone, kind in [(zone, kind) for zone in order.zones for kind in order.machine_types]:
            if time.monotonic() > deadline:
                break
            resource = launch_resource(order, self._cluster, kind, metadata)
            try:
                request = request_id(self._cluster, pool, order.token, zone, kind)
                return self._insert(order.spec, zone, request, resource, deadline)
            except NoCapacity as error:
                refusal = error
        raise refusal

    def machines(self) -> list[Machine]:
        machines = [machine_of(machine, self._table) for machine in self._described()]
        self._zones = {one.id: one.zone for one in machines}
        return machines

    def boot_error(self, machine_id: str) -> str | None:
        """See the contract. The error is a guest attribute, which takes one call."""
        if (zone := self._zones.get(machine_id)) is None:
            return None
        read = self._clients().machines.get_guest_attributes
        attributes = self._act(read, zone, machine_id, query_path=BOOT_ERROR_ATTRIBUTE)
        return attributes and one_line(attributes.query_value.items[0].value)

    def terminate(self, *machine_ids: str) -> None:
        """See the contract. Ignores machines without the cluster's label.

        A zone that doesn't answer is not asked for its other machines.
        """
        errors: list[FleetError] = []
        silent = set()
        for machine in self._find(*machine_ids):
            if (zone := last(machine.zone)) in silent:
                continue
            try:
                self._act(self._clients().machines.delete_unary, zone, machine.name)
            except Throttled:
                raise
            except FleetError as error:
                errors.append(error)
                if isinstance(error, CloudUnavailable):
                    silent.add(zone)
        if errors:
            raise errors[0]

    def evict(self, machine_id: str, notice_seconds: float | None = None) -> None:  # noqa: ARG002
        """See the contract. A simulated maintenance preempts a spot machine in half a minute."""
        for machine in self._find(machine_id):
            if not is_spot(machine):
                raise FleetError(
                    f"{machine_id}: Google does not preempt on-demand machines",
                    remedy="end it without notice",
                )
            simulate = self._clients().machines.simulate_maintenance_event_unary
            self._act(simulate, last(machine.zone), machine_id)

    def close(self) -> None:
        if self._clients.made is not None:
            for each in vars(self._clients.made).values():
                each.transport.close()

    def _metadata(self, spec: GcpPoolSpec, boot: Boot) -> dict[str, str]:
        script = worker_script(boot_environment(boot, "gcp", spec.region, spec.template.secrets))
        own = self._template(spec)
        user_data = combined(own.get(USER_DATA_KEY, ""), script, USER_DATA_BYTES)
        return {**own, USER_DATA_KEY: user_data}

    def _template(self, spec: GcpPoolSpec) -> dict[str, str]:
        """Return the template's own metadata, which ours would otherwise replace."""
        path = template_path(spec).split("/")
        arguments = {"project": self._project, "instance_template": path[-1]}
        if path[2] == "regions":
            arguments["region"] = path[3]
        clients = self._clients()
        client = clients.regional if "region" in arguments else clients.everywhere
        template = call(client.get, arguments, spec.name)
        return {item.key: item.value for item in template.properties.metadata.items}

    def _insert(
        self,
        spec: GcpPoolSpec,
        zone: str,
        request: str,
        resource: dict[str, Any],
        deadline: float,
    ) -> list[str]:
        arguments = {
            "project": self._project,
            "zone": zone,
            "request_id": request,
            "bulk_insert_instance_resource_resource": resource,
        }
        operation = call(self._clients().machines.bulk_insert_unary, arguments, spec.name, zone)
        operation = self._await(operation, zone, deadline)
        names = list(resource["per_instance_properties"])
        if operation.status != compute_v1.Operation.Status.DONE:
            return names
        listed = {machine.name for machine in self._described() if last(machine.zone) == zone}
        if granted := [name for name in names if name in listed]:
            return granted
        if not operation.error.errors:
            return names  # Machines of an earlier launch that are gone.
        first = operation.error.errors[0]
        status = operation.http_error_status_code or 400
        raise refusal_of(CODES, first.code, first.message, status=status, pool=spec.name, zone=zone)

    def _await(self, operation: Any, zone: str, deadline: float) -> Any:
        """Wait for an operation until the deadline, and return its last state."""
        arguments = {"project": self._project, "zone": zone, "operation": operation.name}
        while operation.status != compute_v1.Operation.Status.DONE:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            try:
                operation = call(self._clients().operations.wait, arguments, seconds=left)
            except CloudUnavailable:
                break
        return operation

    def _granted(self, token: str) -> list[str]:
        """Return the machines of an earlier launch with this token."""
        machines = self._described(labelled(LAUNCH_LABEL, launch_label(token)))
        return sorted(machine.name for machine in machines)

    def _find(self, *machine_ids: str) -> list[Any]:
        """Return the machines that exist, in one call."""
        names = {each for each in machine_ids if re.fullmatch(r"[a-z0-9-]+", each)}
        if not names:
            return []
        only = [f'(name = "{next(iter(names))}")'] if len(names) == 1 else []
        return [machine for machine in self._described(*only) if machine.name in names]

    def _described(self, *filters: str) -> list[Any]:
        """Return this cluster's machines that match all filters."""
        arguments = {
            "project": self._project,
            "filter": " AND ".join([labelled(CLUSTER_LABEL, self._cluster), *filters]),
            "max_results": self._page,
        }
        # Further pages are fetched as the first one is read.
        scopes = attempt(
            lambda: list(self._clients().machines.aggregated_list(arguments, **limits()))
        )
        return [
            machine
            for _, scope in scopes
            for machine in scope.instances
            if machine.status in STATES
        ]

    def _act(self, method: Callable[..., Any], zone: str, machine: str, **more: str) -> Any:
        """Call a method for a machine, and return None if the resource doesn't exist."""
        arguments = {**more, "project": self._project, "zone": zone, "instance": machine}
        try:
            return call(method, arguments)
        except InvalidRequest as error:
            if error.details.get("status") != HTTPStatus.NOT_FOUND:
                raise
            return None

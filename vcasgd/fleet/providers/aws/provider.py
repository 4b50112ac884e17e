"""Provider for EC2 machines, bought with ``CreateFleet``. The only importer of boto3.

A launch is one call for several types and zones, and EC2 chooses among them by price and capacity
(``price-capacity-optimized``). Each machine has the tags ``vcasgd:cluster``, ``vcasgd:pool``, and
``vcasgd:launch`` from its start, so purchases need no other record. docs/security.md lists the
permissions that the controller needs.
"""

from __future__ import annotations

import base64
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from vcasgd.errors import CloudUnavailable, FleetError, InvalidRequest, NoCapacity
from vcasgd.fleet.pools import AwsPoolSpec
from vcasgd.fleet.prices import PriceTable
from vcasgd.fleet.providers.aws.errors import error_of, error_without_answer, worst
from vcasgd.fleet.providers.aws.prices import Prices, SpotPrices
from vcasgd.fleet.providers.aws.request import (
    BOOT_ERROR_TAG,
    CLUSTER_TAG,
    LAUNCH_TAG,
    POOL_TAG,
    filtered,
    fleet_request,
    tagged,
    template_of,
)
from vcasgd.fleet.providers.base import (
    CONNECTIONS,
    Boot,
    Machine,
    MachineState,
    Offer,
    one_line,
)
from vcasgd.fleet.providers.pooled import LaunchOrder, PooledProvider
from vcasgd.fleet.providers.user_data import boot_environment, combined, worker_script

log = logging.getLogger(__name__)

#: Time limits of a call; CreateFleet takes some seconds.
CONNECT_SECONDS, READ_SECONDS = 5.0, 20.0
#: botocore's own attempts at a call that was throttled or not answered.
ATTEMPTS = 2
#: EC2's documented limit on user data, before base64.
USER_DATA_BYTES = 16_384
#: Seconds within which EC2 lists a launch under its tag after it knows its token.
TAG_SECONDS, TAG_POLL_SECONDS = 10.0, 0.5
#: Machines in one page of a listing.
PAGE = 1000
#: EC2's documented limit on the values of a filter.
FILTER_VALUES = 200
#: Refusals of a call for several machines because of one of them; EC2 then ends none in its zone.
ABOUT_ONE_MACHINE = ("OperationNotPermitted", "IncorrectInstanceState", "UnsupportedOperation")

#: States of machines that still exist.
_STATES = {
    "pending": MachineState.BOOTING,
    "running": MachineState.RUNNING,
    # A stopped machine is listed as running, so the plan gives it up as lost and ends it.
    "stopping": MachineState.RUNNING,
    "stopped": MachineState.RUNNING,
}


class AwsProvider(PooledProvider[AwsPoolSpec]):
    """Implementation of :class:`~vcasgd.fleet.providers.base.Provider` for pools of one region.

    Launches return after some seconds. Machines are listed within seconds, and run a minute later.
    """

    name = "aws"
    #: EC2's documented limit on machines in one TerminateInstances.
    max_terminated = 1000

    def __init__(
        self,
        cluster: str,
        pools: Sequence[AwsPoolSpec],
        table: PriceTable,
        *,
        price_seconds: float,
        page: int = PAGE,
    ) -> None:
        """Create the provider. Raises :class:`~vcasgd.errors.SpecError` for a type without a price.

        ``price_seconds`` is how long spot prices are cached; they change a few times a day.
        """
        super().__init__(cluster, pools)
        self._region = pools[0].region
        self._table = table
        self._page = page
        for kind in {kind for pool in pools for kind in pool.machine_types}:
            table.price(self._region, kind)
        self._ec2 = client("ec2", self._region)
        self._spot = SpotPrices(self._price_history, price_seconds)

    def offers(self, pool: str) -> list[Offer]:
        """See the contract. A type without a spot price in a zone isn't sold there."""
        spec = self._pool(pool)
        offers = super().offers(pool)
        if not spec.spot:
            return offers
        spot = self._spot.of(spec.machine_types, spec.zones)
        prices = [(each, spot.get((each.machine_type, each.zone))) for each in offers]
        return [
            replace(
                offer,
                price_per_hour=price.per_hour,
                as_of=price.since,
                source="EC2 spot price history",
            )
            for offer, price in prices
            if price is not None
        ]

    def _launch(self, order: LaunchOrder[AwsPoolSpec]) -> list[str]:
        """See the contract. EC2 stops listing terminated machines after an hour."""
        pool = order.spec.name
        if granted := self._granted(order.token):
            return granted
        request = fleet_request(order, self._cluster, self._user_data(order.spec, order.boot))
        try:
            answer = self._call("create_fleet", pool, request)
        except InvalidRequest as error:
            if error.code != "IdempotentParameterMismatch":
                raise
            return self._await_granted(order.token)
        ids = [id_ for part in answer.get("Instances", ()) for id_ in part["InstanceIds"]]
        if not ids:
            raise _refusal(pool, answer)
        return sorted(ids)

    def machines(self) -> list[Machine]:
        """See the contract."""
        rows = list(self._described(filtered("instance-state-name", *sorted(_STATES))))
        spot = self._spot_prices([row for row in rows if _is_spot(row)])
        reported = {row["InstanceId"]: _tags(row).get(BOOT_ERROR_TAG, "") for row in rows}
        self._boot_errors = {machine: one_line(text) for machine, text in reported.items()}
        return [self._machine(row, spot) for row in rows]

    def terminate(self, *machine_ids: str) -> None:
        """See the contract. Ignores machines without the cluster's tag."""
        own = [
            row["InstanceId"]
            for start in range(0, len(machine_ids), FILTER_VALUES)
            for row in self._described(
                filtered("instance-id", *machine_ids[start : start + FILTER_VALUES])
            )
        ]
        errors = [
            error
            for start in range(0, len(own), self.max_terminated)
            for error in self._terminate(own[start : start + self.max_terminated])
        ]
        if errors:
            raise errors[0]

    def kill(self, machine_id: str) -> None:
        """See the contract. EC2 shuts the system down first."""
        self.terminate(machine_id)

    def evict(self, machine_id: str, notice_seconds: float | None = None) -> None:  # noqa: ARG002
        """See the contract. Unsupported: EC2 interrupts on request only in fault injection."""
        raise FleetError(
            f"{machine_id}: EC2 gives no notice on request",
            remedy="end it without notice, or use AWS Fault Injection Service "
            "(aws:ec2:send-spot-instance-interruptions)",
        )

    def close(self) -> None:
        """See the contract."""
        self._ec2.close()

    def _terminate(self, machines: list[str]) -> list[FleetError]:
        """Terminate machines; halve the call while EC2 refuses it because of one of them."""
        try:
            self._call("terminate_instances", None, {"InstanceIds": machines})
        except FleetError as error:
            about_one = error.code in ABOUT_ONE_MACHINE or isinstance(error, InvalidRequest)
            if len(machines) == 1 or not about_one:
                return [error]
            middle = len(machines) // 2
            return [*self._terminate(machines[:middle]), *self._terminate(machines[middle:])]
        return []

    def _user_data(self, spec: AwsPoolSpec, boot: Boot) -> str:
        environment = boot_environment(boot, "aws", self._region, spec.template.secrets)
        text = combined(self._template(spec), worker_script(environment), USER_DATA_BYTES)
        return base64.b64encode(text.encode()).decode()

    def _template(self, spec: AwsPoolSpec) -> str:
        """Return the template's own user data, which ours would otherwise replace."""
        request: dict[str, Any] = {**template_of(spec)}
        request["Versions"] = [request.pop("Version")]
        answer = self._call("describe_launch_template_versions", spec.name, request)
        data = answer["LaunchTemplateVersions"][0]["LaunchTemplateData"].get("UserData", "")
        return base64.b64decode(data).decode()

    def _granted(self, token: str) -> list[str]:
        """Return the machines of an earlier launch with this token, even those that are gone."""
        return sorted(row["InstanceId"] for row in self._described(tagged(LAUNCH_TAG, token)))

    def _await_granted(self, token: str) -> list[str]:
        """Wait until EC2 lists the machines of a token that it already knows."""
        deadline = time.monotonic() + TAG_SECONDS
        while not (granted := self._granted(token)):
            if time.monotonic() > deadline:
                raise CloudUnavailable("a launch under this token is not listed yet")
            time.sleep(TAG_POLL_SECONDS)
        return granted

    def _described(self, *filters: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Return this cluster's machines that match all filters."""
        mine = tagged(CLUSTER_TAG, self._cluster)
        request: dict[str, Any] = {"Filters": [mine, *filters], "MaxResults": self._page}
        while True:
            answer = self._call("describe_instances", None, request)
            for reservation in answer["Reservations"]:
                yield from reservation["Instances"]
            if not answer.get("NextToken"):
                return
            request["NextToken"] = answer["NextToken"]

    def _spot_prices(self, rows: list[dict[str, Any]]) -> Prices:
        """Return spot prices, or none on an error, so that machines are still listed."""
        kinds = sorted({row["InstanceType"] for row in rows})
        zones = sorted({row["Placement"]["AvailabilityZone"] for row in rows})
        try:
            return self._spot.of(kinds, zones) if rows else {}
        except FleetError as error:
            log.warning("spot prices: %s", error)
            return {}

    def _machine(self, row: dict[str, Any], spot: Prices) -> Machine:
        kind, zone = row["InstanceType"], row["Placement"]["AvailabilityZone"]
        on_demand = self._table.price_or_highest(self._region, kind)
        current = spot.get((kind, zone)) if _is_spot(row) else None
        return Machine(
            id=row["InstanceId"],
            pool=_tags(row).get(POOL_TAG, ""),
            state=_STATES[row["State"]["Name"]],
            launched_at=row["LaunchTime"].timestamp(),
            notice_at=None,
            host=row.get("PrivateIpAddress", ""),
            price_per_hour=current.per_hour if current else on_demand,
            spot=_is_spot(row),
            zone=zone,
            machine_type=kind,
            on_demand_price_per_hour=on_demand,
        )

    def _offer(self, spec: AwsPoolSpec, zone: str, kind: str) -> Offer:
        """Return an offer at the price on demand."""
        listed = self._table.price(self._region, kind)
        return listed.offer(spec, zone, kind, listed.on_demand)

    def _price_history(self, **request: Any) -> Any:
        return self._call("describe_spot_price_history", None, request)

    def _call(self, operation: str, pool: str | None, arguments: dict[str, Any]) -> Any:
        return call(self._ec2, operation, pool, arguments)


def client(service: str, region: str) -> Any:
    """Create a client with time limits. ``AWS_ENDPOINT_URL`` and AWS's other variables apply."""
    config = Config(
        connect_timeout=CONNECT_SECONDS,
        read_timeout=READ_SECONDS,
        retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
        max_pool_connections=CONNECTIONS,
    )
    try:
        return boto3.session.Session().client(service, region_name=region, config=config)
    except BotoCoreError as error:
        raise error_without_answer(error, service, None) from error


def call(client: Any, operation: str, pool: str | None, arguments: dict[str, Any]) -> Any:
    """Call EC2. Raises the :class:`~vcasgd.errors.FleetError` that its error code maps to."""
    try:
        return getattr(client, operation)(**arguments)
    except ClientError as error:
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 400)
        details = error.response.get("Error", {})
        code, message = details.get("Code", "unknown"), details.get("Message", "")
        raise error_of(code, message, status=status, pool=pool) from error
    except BotoCoreError as error:
        raise error_without_answer(error, operation, pool) from error


def secret(name: str, region: str) -> str:
    """Return a value from Secrets Manager, with this machine's role. Raises :class:`FleetError`."""
    manager = client("secretsmanager", region)
    return str(call(manager, "get_secret_value", None, {"SecretId": name})["SecretString"])


def _refusal(pool: str, answer: dict[str, Any]) -> FleetError:
    errors = [
        error_of(row.get("ErrorCode", ""), row.get("ErrorMessage", ""), pool=pool, zone=_zone(row))
        for row in answer.get("Errors", ())
    ]
    return worst(errors) or NoCapacity(f"{pool}: EC2 has no machine and gave no reason", pool=pool)


def _zone(error: dict[str, Any]) -> str | None:
    overrides = error.get("LaunchTemplateAndOverrides", {}).get("Overrides", {})
    zone = overrides.get("AvailabilityZone")
    return str(zone) if zone else None


def _tags(row: dict[str, Any]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in row.get("Tags", ())}


def _is_spot(row: dict[str, Any]) -> bool:
    return bool(row.get("InstanceLifecycle") == "spot")

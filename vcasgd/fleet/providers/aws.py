"""Provider for EC2 machines, bought with ``CreateFleet``.

A launch is one call for several types and zones, and EC2 chooses among them by price and capacity
(``price-capacity-optimized``). Each machine has the tags ``vcasgd:cluster``, ``vcasgd:pool``, and
``vcasgd:launch`` from its start, so purchases need no other record. docs/security.md lists the
permissions that the controller needs.
"""

from __future__ import annotations

import base64
import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from vcasgd.errors import (
    CloudDenied,
    CloudUnavailable,
    FleetError,
    InvalidRequest,
    NoCapacity,
    QuotaExceeded,
    Throttled,
)
from vcasgd.fleet.pools import AwsPoolSpec
from vcasgd.fleet.prices import PriceTable, Told, is_price
from vcasgd.fleet.providers.aws_calls import (
    BOOT_ERROR_TAG,
    CLUSTER_TAG,
    CODES,
    LAUNCH_TAG,
    POOL_TAG,
    call,
    client,
    filtered,
    fleet_request,
    list_prices,
    listed,
    tagged,
    template_of,
)
from vcasgd.fleet.providers.base import (
    Boot,
    Connection,
    LaunchOrder,
    Provider,
    offer_of,
    one_line,
    refusal_of,
)
from vcasgd.fleet.providers.user_data import boot_environment, combined, worker_script
from vcasgd.schemas.costs import Offer
from vcasgd.schemas.fleet import Machine, MachineState

log = logging.getLogger(__name__)

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
#: Order in which one of several refusals is reported: those that a person must fix come first.
_ORDER = (CloudDenied, InvalidRequest, QuotaExceeded, Throttled, CloudUnavailable, NoCapacity)

#: States of machines that still exist.
_STATES = {
    "pending": MachineState.BOOTING,
    "running": MachineState.RUNNING,
    # A stopped machine is listed as running, so the plan gives it up as lost and ends it.
    "stopping": MachineState.RUNNING,
    "stopped": MachineState.RUNNING,
}


class SpotPrice(NamedTuple):
    """Price in USD per hour, and the start of its validity (Unix seconds)."""

    per_hour: float
    since: float


#: Prices by type and zone, without types that a zone doesn't sell.
Prices = Mapping[tuple[str, str], SpotPrice]


class AwsProvider(Provider[AwsPoolSpec]):
    """Provider for pools of one region.

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
        self._kinds = sorted({kind for pool in pools for kind in pool.machine_types})
        for kind in self._kinds:
            table.price(self._region, kind)
        self._ec2 = Connection(lambda: client("ec2", self._region))
        self._price_seconds = price_seconds
        self._pricing = threading.Lock()
        #: The present spot prices, of which types, and when they are asked for again.
        self._prices: Prices = {}
        self._priced: frozenset[str] = frozenset()
        self._prices_due = float("-inf")
        #: The last known price of each market.
        self._known: dict[tuple[str, str], SpotPrice] = {}

    def offers(self, pool: str) -> list[Offer]:
        """See the contract. A type without a spot price in a zone isn't sold there."""
        spec = self._pool(pool)
        self._table.refresh(
            lambda: Told({self._region: list_prices(self._region, self._kinds)}, {}),
            "price list of AWS",
        )
        offers = super().offers(pool)
        if not spec.spot:
            return offers
        spot, source = self._spot_prices(), "EC2 spot price history"
        return [
            offer.model_copy(
                update={
                    "price_per_hour": price.per_hour,
                    "as_of": price.since,
                    "source": source,
                }
            )
            for offer in offers
            if (price := spot.get((offer.machine_type, offer.zone))) is not None
        ]

    def _launch(self, order: LaunchOrder[AwsPoolSpec]) -> list[str]:
        """See the contract. EC2 stops listing terminated machines after an hour."""
        pool = order.spec.name
        if granted := self._granted(order.token):
            return granted
        request = fleet_request(order, self._cluster, self._user_data(order.spec, order.boot))
        try:
            answer = call(self._ec2(), "create_fleet", pool, request)
        except InvalidRequest as error:
            if error.code != "IdempotentParameterMismatch":
                raise
            return self._await_granted(order.token)
        ids = [id_ for part in answer.get("Instances", ()) for id_ in part["InstanceIds"]]
        if not ids:
            raise _refusal(pool, answer)
        return sorted(ids)

    def machines(self) -> list[Machine]:
        rows = self._described(filtered("instance-state-name", *sorted(_STATES)))
        spot = self._known_prices([row for row in rows if _is_spot(row)])
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

    def evict(self, machine_id: str, notice_seconds: float | None = None) -> None:  # noqa: ARG002
        """See the contract. Unsupported: EC2 interrupts on request only in fault injection."""
        raise FleetError(
            f"{machine_id}: EC2 gives no notice on request",
            remedy="end it without notice, or use AWS Fault Injection Service "
            "(aws:ec2:send-spot-instance-interruptions)",
        )

    def close(self) -> None:
        if self._ec2.made is not None:
            self._ec2.made.close()

    def _terminate(self, machines: list[str]) -> list[FleetError]:
        """Terminate machines; halve the call while EC2 refuses it because of one of them."""
        try:
            call(self._ec2(), "terminate_instances", None, {"InstanceIds": machines})
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
        answer = call(self._ec2(), "describe_launch_template_versions", spec.name, request)
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
                # It got nothing, or is of an earlier ledger. The next launch has another token.
                raise NoCapacity("a launch under this token got no machine")
            time.sleep(TAG_POLL_SECONDS)
        return granted

    def _described(self, *filters: dict[str, Any]) -> list[dict[str, Any]]:
        """Return this cluster's machines that match all filters."""
        mine, rows = tagged(CLUSTER_TAG, self._cluster), "Reservations[].Instances[]"
        return listed(self._ec2(), "describe_instances", rows, self._page, Filters=[mine, *filters])

    def _spot_prices(self, kinds: Collection[str] = ()) -> Prices:
        """Return the present prices, which are cached, of the pools' types and these."""
        with self._pricing:
            if time.monotonic() >= self._prices_due or not self._priced.issuperset(kinds):
                priced = self._priced.union(self._kinds, kinds)
                self._prices = self._fetch_prices(priced)
                self._known |= self._prices
                self._priced = priced
                self._prices_due = time.monotonic() + self._price_seconds
            return self._prices

    def _fetch_prices(self, kinds: Collection[str]) -> Prices:
        rows = listed(
            self._ec2(),
            "describe_spot_price_history",
            "SpotPriceHistory[]",
            InstanceTypes=sorted(kinds),
            ProductDescriptions=["Linux/UNIX"],
            # Starting now returns only the current prices.
            StartTime=datetime.now(UTC),
        )
        return {
            (row["InstanceType"], row["AvailabilityZone"]): SpotPrice(
                float(row["SpotPrice"]), row["Timestamp"].timestamp()
            )
            for row in sorted(rows, key=lambda row: row["Timestamp"])
            if is_price(float(row["SpotPrice"]))
        }

    def _known_prices(self, rows: list[dict[str, Any]]) -> Prices:
        """Return the last known spot prices, of types without any after a call.

        A list doesn't wait for the others: the offers do. At the price on demand instead, machines
        would seem too dear, and use up budgets.
        """
        kinds = {row["InstanceType"] for row in rows}
        if not self._priced.issuperset(kinds):
            try:
                self._spot_prices(kinds)
            except FleetError as error:
                log.warning("spot prices: %s", error)
        return self._known

    def _machine(self, row: dict[str, Any], spot: Prices) -> Machine:
        kind, zone = row["InstanceType"], row["Placement"]["AvailabilityZone"]
        on_demand = self._table.price_or_highest(self._region, kind)
        current = spot.get((kind, zone)) if _is_spot(row) else None
        return Machine(
            id=row["InstanceId"],
            pool=_tags(row).get(POOL_TAG, ""),
            state=_STATES[row["State"]["Name"]],
            launched_at=row["LaunchTime"].timestamp(),
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
        return offer_of(spec, zone, kind, listed.on_demand, listed)


def _refusal(pool: str, answer: dict[str, Any]) -> FleetError:
    """Return the error to report of those of single launches, for which the status is 200."""
    errors = [
        refusal_of(
            CODES, row.get("ErrorCode", ""), row.get("ErrorMessage", ""), pool=pool, zone=_zone(row)
        )
        for row in answer.get("Errors", ())
    ]
    if not errors:
        return NoCapacity(f"{pool}: EC2 has no machine and gave no reason")
    return min(errors, key=lambda error: _ORDER.index(type(error)))


def _zone(error: dict[str, Any]) -> str | None:
    overrides = error.get("LaunchTemplateAndOverrides", {}).get("Overrides", {})
    zone = overrides.get("AvailabilityZone")
    return str(zone) if zone else None


def _tags(row: dict[str, Any]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in row.get("Tags", ())}


def _is_spot(row: dict[str, Any]) -> bool:
    return bool(row.get("InstanceLifecycle") == "spot")

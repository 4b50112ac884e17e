"""List prices: tables in the package, and a file of the user whose rows take precedence.

Prices come from the price list of AWS and the catalog of Google where the controller may read
them, and else from tables. Each has a date and a source, which are shown with every price. The
file in ``VCASGD_PRICES`` is YAML or JSON of the same form, by cloud, and takes precedence::

    aws:
      as_of: 2026-11-20
      source: our contract
      types: {p5.48xlarge: {cpus: 192, gpus: 8, memory: 2TiB, gpu: H100, gpu_memory: 80GB}}
      on_demand: {us-east-1: {p5.48xlarge: 41.5}}

All prices are USD per hour. Spot prices of AWS are fetched from EC2 and are never in a table.
"""

from __future__ import annotations

import importlib.resources
import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime
from datetime import time as time_of_day
from functools import cache
from pathlib import Path
from typing import NamedTuple

from pydantic import Field, ValidationError

from vcasgd.errors import FleetError, SpecError
from vcasgd.spec.hardware import Hardware
from vcasgd.spec.problems import spec_error
from vcasgd.spec.values import Size, StrictModel
from vcasgd.spec.yaml import load_mapping

log = logging.getLogger(__name__)

#: Seconds until a cloud's price list is read again.
PRICE_LIST_SECONDS = 86_400.0
#: The same after an attempt that failed.
RETRY_SECONDS = 600.0
#: More than any machine costs, in USD per hour.
MAX_PRICE = 1e6


def is_price(usd: float) -> bool:
    """Return False for NaN, 0, and less: such a machine would use up no budget."""
    return 0 < usd <= MAX_PRICE


class Told(NamedTuple):
    """Prices that a cloud has just told, by region and type."""

    on_demand: dict[str, dict[str, float]]
    spot: dict[str, dict[str, float]]


@dataclass(frozen=True)
class ListPrice:
    """Size and price of a machine type in a region. ``spot`` is None if the table lacks it."""

    on_demand: float
    spot: float | None
    hardware: Hardware
    as_of: float
    """Unix seconds."""
    source: str


class _MachineType(StrictModel):
    cpus: float = Field(gt=0)
    gpus: int = Field(default=0, ge=0)
    memory: Size | None = None
    gpu: str = ""
    gpu_memory: Size | None = None


class _Table(StrictModel):
    as_of: date
    source: str = Field(min_length=1)
    currency: str = Field(default="USD", pattern="^USD$")
    types: dict[str, _MachineType] = Field(default_factory=dict)
    on_demand: dict[str, dict[str, float]] = Field(default_factory=dict)
    spot: dict[str, dict[str, float]] = Field(default_factory=dict)


class PriceTable:
    """List prices of one cloud, each from the first table that has it."""

    def __init__(self, cloud: str, own: list[_Table], bundled: list[_Table]) -> None:
        self._cloud = cloud
        self._own, self._fetched, self._bundled = own, list[_Table](), bundled
        self._reading, self._due = threading.Lock(), float("-inf")

    @classmethod
    def load(cls, cloud: str, override: Path | None = None) -> PriceTable:
        """Load the tables of a cloud, ``aws`` or ``gcp``.

        Raises :class:`~vcasgd.errors.SpecError`.
        """
        overriding = _override(override).get(cloud)
        return cls(cloud, [overriding] if overriding else [], _bundled(cloud))

    @property
    def _tables(self) -> list[_Table]:
        return [*self._own, *self._fetched, *self._bundled]

    def refresh(self, read: Callable[[], Told], source: str) -> None:
        """Use prices that the cloud tells, but for the user's own; read them once a day.

        If the cloud refuses, the last known ones count, or those of the tables.
        """
        with self._reading:
            if time.monotonic() < self._due:
                return
            self._due = time.monotonic() + RETRY_SECONDS
        try:
            told = read()
        except FleetError as error:
            log.info("prices stay as they are: %s", error)
            return
        self._due = time.monotonic() + PRICE_LIST_SECONDS
        today = datetime.now(UTC).date()
        self._fetched = [_Table(as_of=today, source=source, **told._asdict())]

    def price(self, region: str, machine_type: str) -> ListPrice:
        """Return the price of a type in a region.

        Raises :class:`~vcasgd.errors.SpecError` if no table has it, because a machine without a
        price wouldn't count against any budget.
        """
        tables = (table for table in self._in(region) if machine_type in table.on_demand[region])
        table = next(tables, None)
        if table is None:
            raise SpecError(
                f"no known price for {machine_type} in {region}",
                remedy=f"add it under {self._cloud}.on_demand.{region} to a file, and set "
                "VCASGD_PRICES to its path",
                field="machine_types",
            )
        kinds = (table.types[machine_type] for table in self._tables if machine_type in table.types)
        kind = next(kinds, None)
        if kind is None:
            raise SpecError(
                f"no known number of processors for {machine_type}",
                remedy=f"add it under {self._cloud}.types to the file that VCASGD_PRICES names",
                field="machine_types",
            )
        return ListPrice(
            on_demand=table.on_demand[region][machine_type],
            spot=table.spot.get(region, {}).get(machine_type),
            hardware=Hardware(kind.cpus, kind.memory, kind.gpus, kind.gpu, kind.gpu_memory),
            as_of=datetime.combine(table.as_of, time_of_day(), UTC).timestamp(),
            source=f"{table.source} ({table.as_of})",
        )

    def price_or_highest(self, region: str, machine_type: str) -> float:
        """Return the on-demand price in USD per hour.

        An unknown type counts as the most expensive known one; 0 without any price in the region.
        """
        prices = [table.on_demand[region] for table in self._in(region)]
        known = [listed[machine_type] for listed in prices if machine_type in listed]
        return known[0] if known else max((max(listed.values()) for listed in prices), default=0.0)

    def _in(self, region: str) -> list[_Table]:
        return [table for table in self._tables if table.on_demand.get(region)]


@cache
def _bundled(cloud: str) -> list[_Table]:
    """Return the tables in the package, one for each source."""
    folder = importlib.resources.files(__package__) / "data"
    texts = [
        file.read_text() for file in folder.iterdir() if file.name.startswith(f"prices-{cloud}")
    ]
    return [_Table.model_validate(json.loads(text)) for text in texts]


def _override(path: Path | None) -> dict[str, _Table]:
    if path is None:
        return {}
    value = load_mapping(path, "prices", field="VCASGD_PRICES")
    if others := value.keys() - {"aws", "gcp"}:
        raise SpecError(
            f"{path}: unknown cloud {min(map(str, others))}",
            remedy="known: aws, gcp",
            field="VCASGD_PRICES",
        )
    return {cloud: _parse(path, cloud, table) for cloud, table in value.items()}


def _parse(path: Path, cloud: str, value: object) -> _Table:
    try:
        return _Table.model_validate(value)
    except ValidationError as error:
        first = spec_error(error, _Table)
        raise SpecError(
            f"{path}: {cloud}.{first.message}", remedy=first.remedy, field=f"{cloud}.{first.field}"
        ) from error

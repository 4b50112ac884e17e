"""List prices: a table that comes with the package, and a file of one's own that replaces rows.

The clouds' own price lists need permissions that nobody else needs, so what a machine costs on
demand is taken from a table. A table has a date and a source, and both are shown wherever a price
is. The file in ``VCASGD_PRICES`` is YAML or JSON of the same form, for each cloud::

    aws:
      as_of: 2026-11-20
      source: our contract
      types: {p5.48xlarge: {cpus: 192, gpus: 8}}
      on_demand: {us-east-1: {p5.48xlarge: 41.5}}

All prices are USD per hour. What AWS asks for spot machines is never in a table: it is asked for.
"""

from __future__ import annotations

import importlib.resources
import json
from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from functools import cache
from pathlib import Path

from pydantic import Field, ValidationError

from vcasgd.errors import SpecError
from vcasgd.spec.job import spec_error
from vcasgd.spec.strict import StrictModel
from vcasgd.spec.yaml import load_mapping


@dataclass(frozen=True)
class ListPrice:
    """What a type of machine is and costs in a region; ``spot`` where the table has it."""

    on_demand: float
    spot: float | None
    cpus: float
    gpus: int
    as_of: float
    """Unix seconds."""
    source: str


class _Type(StrictModel):
    cpus: float = Field(gt=0)
    gpus: int = Field(default=0, ge=0)


class _Table(StrictModel):
    as_of: date
    source: str = Field(min_length=1)
    currency: str = Field(default="USD", pattern="^USD$")
    types: dict[str, _Type] = Field(default_factory=dict)
    on_demand: dict[str, dict[str, float]] = Field(default_factory=dict)
    spot: dict[str, dict[str, float]] = Field(default_factory=dict)


class PriceTable:
    """The list prices of one cloud: the rows of the first table that has them."""

    def __init__(self, cloud: str, tables: list[_Table]) -> None:
        self._cloud = cloud
        self._tables = tables

    @classmethod
    def load(cls, cloud: str, override: Path | None = None) -> PriceTable:
        """``cloud`` is ``aws`` or ``gcp``. Raises :class:`~vcasgd.errors.SpecError`."""
        own = _override(override).get(cloud)
        return cls(cloud, [table for table in (own, _bundled(cloud)) if table is not None])

    def price(self, region: str, instance_type: str) -> ListPrice:
        """Raises :class:`~vcasgd.errors.SpecError` where no table has it: a machine whose price
        is not known would not count against any budget."""
        table = self._with_price(region, instance_type)
        kind = self._kind(instance_type)
        return ListPrice(
            on_demand=table.on_demand[region][instance_type],
            spot=table.spot.get(region, {}).get(instance_type),
            cpus=kind.cpus,
            gpus=kind.gpus,
            as_of=datetime.combine(table.as_of, time(), UTC).timestamp(),
            source=f"{table.source} ({table.as_of})",
        )

    def price_or_dearest(self, region: str, instance_type: str) -> float:
        """On demand. A machine whose type is in no table counts as the dearest that is; 0 where
        there is no price at all."""
        tables = self._in(region)
        for table in tables:
            if instance_type in table.on_demand[region]:
                return table.on_demand[region][instance_type]
        return max((max(table.on_demand[region].values()) for table in tables), default=0.0)

    def _in(self, region: str) -> list[_Table]:
        return [table for table in self._tables if table.on_demand.get(region)]

    def _with_price(self, region: str, instance_type: str) -> _Table:
        for table in self._in(region):
            if instance_type in table.on_demand[region]:
                return table
        raise SpecError(
            f"no price is known for {instance_type} in {region}",
            remedy=f"write it under {self._cloud}.on_demand.{region} into a file that "
            "VCASGD_PRICES names",
            field="instance_types",
        )

    def _kind(self, instance_type: str) -> _Type:
        for table in self._tables:
            if instance_type in table.types:
                return table.types[instance_type]
        raise SpecError(
            f"it is not known how many processors {instance_type} has",
            remedy=f"write them under {self._cloud}.types into the file that VCASGD_PRICES names",
            field="instance_types",
        )


@cache
def _bundled(cloud: str) -> _Table:
    text = (importlib.resources.files(__package__) / "data" / f"prices-{cloud}.json").read_text()
    return _Table.model_validate(json.loads(text))


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

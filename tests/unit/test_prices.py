"""Price tables: dates, sources, overrides, and errors for unknown prices."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from vcasgd.errors import CloudUnavailable, SpecError
from vcasgd.fleet.prices import PriceTable, Told
from vcasgd.spec.hardware import Hardware

OVERRIDE = """
aws:
  as_of: 2026-11-01
  source: our contract
  types: {huge: {cpus: 96, gpus: 8}}
  on_demand: {us-east-1: {huge: 41.5, c5.xlarge: 0.1}}
"""


@pytest.fixture
def override(tmp_path: Path) -> Path:
    path = tmp_path / "prices.yaml"
    path.write_text(OVERRIDE)
    return path


def test_packaged_price_has_a_date_and_a_source() -> None:
    price = PriceTable.load("aws").price("us-east-1", "c5.xlarge")
    assert (price.on_demand, price.spot, price.hardware) == (0.17, None, Hardware(4, 8.59))
    assert price.as_of == datetime(2025, 3, 2, tzinfo=UTC).timestamp()
    assert "2025-03-02" in price.source


def test_what_the_cloud_tells_precedes_the_package_and_follows_the_users_file(
    override: Path,
) -> None:
    table = PriceTable.load("aws", override)
    told = Told({"us-east-1": {"c5.xlarge": 0.19, "m5.large": 0.11}}, {})
    table.refresh(lambda: told, "price list of AWS")

    assert table.price("us-east-1", "c5.xlarge").on_demand == 0.1
    price = table.price("us-east-1", "m5.large")
    assert (price.on_demand, price.hardware.cpus) == (0.11, 2)
    assert price.source == f"price list of AWS ({datetime.now(UTC).date()})"
    assert table.price("us-east-2", "m5.large").source != price.source


def test_a_price_list_that_failed_is_read_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    now, table, kind = [0.0], PriceTable.load("aws"), ("us-east-1", "m5.large")
    monkeypatch.setattr("vcasgd.fleet.prices.time.monotonic", lambda: now[0])
    answers = iter([CloudUnavailable("silent"), Told({kind[0]: {kind[1]: 0.11}}, {})])

    def read() -> Told:
        answer = next(answers)
        if isinstance(answer, Told):
            return answer
        raise answer

    for seconds, told in ((0, False), (60, False), (600, True), (80_000, True)):
        now[0] += seconds
        table.refresh(read, "price list of AWS")
        assert (table.price(*kind).on_demand == 0.11) == told


@pytest.mark.parametrize(
    ("kind", "gpus", "on_demand"),
    [("g2-standard-4", 1, 0.70683), ("a2-highgpu-8g", 8, 29.38708), ("a3-highgpu-8g", 8, 87.83246)],
)
def test_google_types_with_gpus(kind: str, gpus: int, on_demand: float) -> None:
    """Their prices, from a source of their own, contain those of the GPUs."""
    price = PriceTable.load("gcp").price("us-central1", kind)
    assert (price.hardware.gpus, price.on_demand) == (gpus, on_demand)
    assert price.spot is not None
    assert 0.2 < price.spot / price.on_demand < 0.6
    assert "SkyPilot" in price.source


@pytest.mark.parametrize("cloud", ["aws", "gcp"])
def test_every_packaged_type_has_its_processors(cloud: str) -> None:
    table = PriceTable.load(cloud)
    rows = [
        table.price(region, kind)
        for each in table._tables
        for region in each.on_demand
        for kind in each.on_demand[region]
    ]
    assert len(rows) > 50
    assert all(row.hardware.cpus >= 2 and row.on_demand > 0.01 for row in rows)


def test_price_of_the_file_takes_precedence(override: Path) -> None:
    table = PriceTable.load("aws", override)
    assert table.price("us-east-1", "c5.xlarge").on_demand == 0.1
    assert table.price("us-east-1", "c5.xlarge").source == "our contract (2026-11-01)"
    assert table.price("us-east-1", "huge").hardware.gpus == 8
    assert table.price("us-east-1", "m5.large").on_demand == 0.096
    assert table.price_or_highest("us-east-1", "m5.large") == 0.096
    assert table.price_or_highest("us-east-1", "unknown") == 41.5


@pytest.mark.parametrize(
    ("region", "kind", "words"),
    [
        ("us-east-1", "x1e.32xlarge", "no known price for x1e.32xlarge in us-east-1"),
        ("mars-1", "c5.xlarge", "aws.on_demand.mars-1"),
    ],
)
def test_unknown_price_is_an_error(region: str, kind: str, words: str) -> None:
    with pytest.raises(SpecError, match="VCASGD_PRICES") as caught:
        PriceTable.load("aws").price(region, kind)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("aws: {source: x}", "aws.as_of: is required"),
        ("aws: {as_of: 2026-01-01, source: x, price: {}}", "aws.price: there is no such field"),
        ("azure: {}", "known: aws, gcp"),
        ("[", "is not YAML"),
    ],
)
def test_invalid_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text(text)
    with pytest.raises(SpecError, match=r"prices\.yaml") as caught:
        PriceTable.load("aws", path)
    assert words in str(caught.value)

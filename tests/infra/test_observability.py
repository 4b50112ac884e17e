"""Prometheus rules and the Grafana dashboard use the metric names that the API exports."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families
from support.api_harness import Api
from support.waiting import PATIENCE

INFRA = Path(__file__).parents[2] / "infra"
NAME = re.compile(r"\bvcasgd_[a-z_]+")


def names_of_a_family(name: str, kind: str) -> set[str]:
    match kind:
        case "counter":
            return {f"{name}_total"}
        case "histogram":
            return {f"{name}_bucket", f"{name}_sum", f"{name}_count"}
        case "info":
            return {f"{name}_info"}
    return {name}


def exposed_metrics(api: Api) -> set[str]:
    text = httpx.get(f"{api.url}/metrics", trust_env=False, timeout=PATIENCE).text
    families = text_string_to_metric_families(text)
    names = {name for family in families for name in names_of_a_family(family.name, family.type)}
    return {name for name in names if name.startswith("vcasgd_")}


def queries(panels: list[dict[str, Any]]) -> Iterator[str]:
    for panel in panels:
        yield from (target["expr"] for target in panel.get("targets", []))


def test_dashboard_shows_exactly_the_exported_metrics(api: Api) -> None:
    board = json.loads((INFRA / "grafana" / "vcasgd.json").read_text())

    assert set(NAME.findall(" ".join(queries(board["panels"])))) == exposed_metrics(api)


def test_alerts_use_exported_metrics(api: Api) -> None:
    rules = yaml.safe_load((INFRA / "prometheus" / "rules.yml").read_text())
    alerts = [rule for group in rules["groups"] for rule in group["rules"]]

    assert {name for rule in alerts for name in NAME.findall(rule["expr"])} <= exposed_metrics(api)
    assert all(rule["annotations"]["summary"] for rule in alerts)
    scrape = yaml.safe_load((INFRA / "prometheus" / "prometheus.yml").read_text())
    assert scrape["rule_files"] == ["rules.yml"]
    assert scrape["scrape_configs"][0]["metrics_path"] == "/metrics"

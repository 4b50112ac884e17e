"""Names that the reference pages are generated from are described."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import vcasgd
from vcasgd.api.routes.monitoring import empty_metrics
from vcasgd.fleet.pools import PoolSpec
from vcasgd.settings import Settings
from vcasgd.spec.job import JobSpec

PACKAGE = Path(vcasgd.__file__).parent

sys.path.insert(0, str(PACKAGE.parent / "docs/site"))
import reference  # noqa: E402


def test_each_field_of_jobs_and_pools_has_a_description() -> None:
    models: dict[str, Any] = {}
    for one in (JobSpec, PoolSpec, *reference.TEMPLATES.values()):
        schema = one.model_json_schema()
        models |= {one.__name__: schema, **schema.get("$defs", {})}
    missing = [
        f"{name}.{key}"
        for name, model in models.items()
        for key, field in model.get("properties", {}).items()
        if not field.get("description")
    ]
    assert missing == []


def test_each_setting_and_metric_has_a_description() -> None:
    assert [n for n, field in Settings.model_fields.items() if not field.description] == []
    families = list(empty_metrics())
    assert len(families) > 20
    assert [family.name for family in families if not family.documentation] == []

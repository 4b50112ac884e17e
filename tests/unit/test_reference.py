"""Names that the reference pages are generated from are described."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import vcasgd
from vcasgd.api.routes.monitoring import empty_metrics
from vcasgd.fleet.pools import PoolSpec
from vcasgd.schemas.history import EVENTS
from vcasgd.settings import Settings
from vcasgd.spec.job import JobSpec, JobState

PACKAGE = Path(vcasgd.__file__).parent
#: Calls that record an event of a kind.
RECORDING = {"event", "add_event", "NewEvent", "note", "announce", "event_text"}

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


def kinds(tree: ast.AST) -> Iterator[str]:
    """Yield the kinds of events that a module names: in calls, and as keys that it fills in."""
    for node in ast.walk(tree):
        parts: list[ast.expr] = []
        if isinstance(node, ast.Call):
            function = node.func
            name = getattr(function, "attr", getattr(function, "id", ""))
            if name.lstrip("_") in RECORDING:
                parts = [*node.args, *(each.value for each in node.keywords)]
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            parts = [node.slice]
        elif isinstance(node, ast.Dict) and node.keys:
            # Other dictionaries have names with dashes, too.
            kinds_of_notes = [each for each in node.keys if isinstance(each, ast.Constant)]
            parts = [each for each in kinds_of_notes if each.value in EVENTS]
        for each in chain.from_iterable(map(ast.walk, parts)):
            text = each.value if isinstance(each, ast.Constant) else None
            if isinstance(text, str) and re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", text):
                yield text


def test_each_kind_of_event_is_described_and_recorded() -> None:
    """The reference page and the dashboard name no kind that isn't described."""
    recorded = {
        kind
        for file in PACKAGE.rglob("*.py")
        if "agent" not in file.parts
        for kind in kinds(ast.parse(file.read_text()))
    }
    states = {f"job-{state}" for state in JobState} - {"job-starting"}
    losses = {"worker-evicted", "worker-killed"}

    assert "clip-approximated" in recorded, "a key of a dictionary"
    assert recorded | states <= EVENTS.keys()
    assert {kind for kind in EVENTS if "-" in kind} <= recorded | states | losses

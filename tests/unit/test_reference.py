"""The reference pages are complete, because they are generated from described names."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import vcasgd
from vcasgd.api.routes.monitoring import empty_metrics
from vcasgd.cli import app
from vcasgd.fleet.pools import PoolSpec
from vcasgd.schemas.history import EVENTS
from vcasgd.settings import Settings
from vcasgd.spec.job import JobSpec, JobState

PACKAGE = Path(vcasgd.__file__).parent
#: Calls that record an event of a kind.
RECORDING = {"event", "add_event", "NewEvent", "note", "announce", "event_text"}

sys.path.insert(0, str(PACKAGE.parent / "docs/site"))
import commands  # noqa: E402
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
        for each in ast.walk(ast.Tuple(elts=parts, ctx=ast.Load())):
            text = each.value if isinstance(each, ast.Constant) else None
            if isinstance(text, str) and re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", text):
                yield text


def test_each_kind_of_event_is_described_and_recorded() -> None:
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


@pytest.mark.parametrize("name", reference.GENERATED)
def test_a_reference_has_what_people_look_up(name: str) -> None:
    wanted = {
        "job": ("`update.staleness`", "`workers.max_price_per_hour`", "from 1 to 10,000"),
        "pools": ("`max_machines`", "`template.launch_template`"),
        "scenario": ("`max_pause`",),
        "settings": ("`VCASGD_API_PORT`",),
        "metrics": ("`vcasgd_job_updates_rejected_total` | counter | `job`, `reason`",),
        "events": ("`worker-evicted`",),
        "commands": ("## `vcasgd token create`", "--follow"),
        "rest": ("/api/v1/jobs/{job}/events", 'id="schema-JobView"'),
        "python": (
            "| `clip_norm` | `None` |",
            "### `Task.loss`",
            "### `Session.step`",
        ),
    }[name]
    page = reference.GENERATED[name]()
    assert [each for each in wanted if each not in page] == []
    assert not re.search(r":\w+:`", page), "roles of docstrings are resolved"


def test_each_command_of_the_documentation_exists() -> None:
    found = [each for page in commands.pages() for each in commands.commands(read(page))]

    assert len(found) > 200
    assert list(commands.check()) == []


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("vcasgd submit job.yaml --follow", None),
        ("X=1 vcasgd token create ann --scope read  # once", None),
        ("vcasgd sumbit job.yaml", "vcasgd has no command sumbit"),
        ("vcasgd token make ann", "vcasgd has no command make"),
        ("vcasgd submit job.yaml --folow", "submit has no option --folow"),
        ("make docz", "make has no docz"),
        ("python benchmarks/nothing.py", "there is no benchmarks/nothing.py"),
        ("python -m benchmarks.measure store", None),
    ],
)
def test_a_wrong_command_is_found(command: str, problem: str | None) -> None:
    root = typer.main.get_command(app)
    assert commands.problem(command, root, {"docs"}) == problem


def test_commands_are_found_in_both_kinds_of_blocks() -> None:
    page = (
        "Text with vcasgd jobs.\n\n    vcasgd up\n    ready at 8700\n\n"
        "```bash\ncurl -d '{\n}' x \\\n  y\nMODE=1\ncat <<END\na\nEND\nls\n```\n\n"
        '```python title="a.py"\nx = 1\n```\n'
    )
    assert list(commands.commands(page)) == [
        (3, "vcasgd up"), (7, "curl -d '{\n}' x \\\n  y"), (10, "MODE=1"),
        (11, "cat <<END\na\nEND"), (14, "ls"),
    ]  # fmt: skip
    assert [block.title for block in commands.blocks(page)] == [None, None, "a.py"]


def test_commands_are_found_within_sentences() -> None:
    page = "Run `vcasgd\nup` once.\n\n    vcasgd jobs\n\nThen `vcasgd show JOB`.\n"
    assert list(commands.mentions(page)) == [(1, "vcasgd up"), (6, "vcasgd show JOB")]


def read(page: str) -> str:
    return (PACKAGE.parent / page).read_text()

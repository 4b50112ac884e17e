"""Reference pages from the code: tables of fields, settings, commands, routes, metrics, events."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, cast

import typer
from pydantic import BaseModel, SecretStr

import vcasgd
from vcasgd.api import reference as api_page
from vcasgd.api.app import create_app
from vcasgd.api.routes.monitoring import empty_metrics
from vcasgd.chaos.scenario import FaultSpec
from vcasgd.cli.commands import app
from vcasgd.client.job import Job
from vcasgd.data import ShardedDataset
from vcasgd.fleet.pools import (
    AwsTemplate,
    ExecTemplate,
    GcpTemplate,
    KubernetesTemplate,
    LocalTemplate,
    PoolSpec,
    SlurmTemplate,
)
from vcasgd.schemas.history import EVENTS
from vcasgd.settings import Settings
from vcasgd.spec.job import JobSpec
from vcasgd.spec.values import StrictModel
from vcasgd.storage.objects import Storage
from vcasgd.store.connection import connect

#: Pages, relative to ``docs/reference``, that explain a section or a field of a job file.
SEE = {
    "args": "../jobs.md#arguments",
    "base": "../how-to/peft.md#the-base",
    "batch": "../jobs.md#batches-and-local-steps",
    "checkpoint": "../jobs.md#which-model-you-get",
    "update.codec": "../jobs.md#choosing-the-encoding",
    "data": "../jobs.md#labels",
    "ema": "../jobs.md#averages-of-the-model",
    "env": "../how-to/private-data.md#variables",
    "epochs": "../jobs.md#epochs-subtasks-pushes",
    "evaluate": "../jobs.md#evaluation",
    "workers.gpus": "../how-to/gpus.md#one-worker-with-all-gpus",
    "finish_by": "../costs.md#deadlines",
    "labels": "../jobs.md#labels",
    "stop.max_cost_usd": "../costs.md#the-budget",
    "on_bad_sample": "../jobs.md#bad-samples",
    "optimizer_state": "../jobs.md#the-optimizer",
    "workers.pools": "../pools.md#pools-of-a-job",
    "priority": "../jobs.md#priority-and-weight",
    "push_every": "../jobs.md#epochs-subtasks-pushes",
    "requirements": "../how-to/private-data.md#packages",
    "resources": "../pools.md#resources-of-a-job",
    "update.rule": "../jobs.md#choosing-the-rule",
    "secrets": "../how-to/private-data.md#secrets",
    "setup": "../how-to/private-data.md#setup-commands",
    "workers.spare": "../costs.md#spare-machines",
    "update.staleness": "../jobs.md#choosing-the-rule",
    "start_from": "../jobs.md#start-from-trained-weights",
    "stop": "../jobs.md#evaluation",
    "subtasks_per_epoch": "../jobs.md#epochs-subtasks-pushes",
    "task": "../jobs.md#the-task",
    "track": "../how-to/trackers.md#exports-by-the-cluster",
    "tuning": "../jobs.md#automatic-tuning",
    "weight": "../jobs.md#priority-and-weight",
    "within": "../costs.md#deadlines",
    "working_dir": "../jobs.md#the-working-directory",
}
TEMPLATES: Mapping[str, type[StrictModel]] = {
    "aws": AwsTemplate,
    "gcp": GcpTemplate,
    "slurm": SlurmTemplate,
    "kubernetes": KubernetesTemplate,
    "exec": ExecTemplate,
    "local": LocalTemplate,
}
#: Sphinx roles of docstrings, of whose targets the last part is shown.
_ROLE = re.compile(r":(?:py:)?\w+:`(?:[^<`]*<)?~?\.?([^`>]+)>?`")


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table. Cells have one line."""
    lines = [list(heads)]
    lines += [["---"] * len(lines[0])]
    lines += [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


# -- job.yaml -----------------------------------------------------------------------------------


def scenario() -> str:
    """Return the fields of a fault in a scenario."""
    schema = FaultSpec.model_json_schema()
    return "\n\n".join(_model("", schema, schema.get("$defs", {}), set()))


def job() -> str:
    """Return the fields of a job file, a section for each nested model."""
    schema = JobSpec.model_json_schema()
    return "\n\n".join(_model("", schema, schema["$defs"], set()))


def pools() -> str:
    """Return the fields of a pool, and those of each provider's template."""
    parts = _model("", PoolSpec.model_json_schema(), {}, set())
    for name, template in TEMPLATES.items():
        schema = template.model_json_schema()
        fields = _model("template", schema, schema.get("$defs", {}), set())
        parts = chain(parts, (f"## Template of `{name}`", _prose(schema["description"])), fields)
    return "\n\n".join(parts)


def _model(
    path: str, model: Mapping[str, Any], models: Mapping[str, Any], shown: set[str]
) -> Iterator[str]:
    required, nested, rows = model.get("required", ()), [], []
    for name, field in model["properties"].items():
        full = f"{path}.{name}" if path else name
        parts = [each["$ref"].rpartition("/")[2] for each in _choices(field) if "$ref" in each]
        parts = [part for part in parts if "properties" in models[part]]
        nested += [(full, part, len(parts) > 1) for part in parts]
        kind = f"[section](#{_slug(full)})" if parts else _kind(field, models)
        default = "required" if name in required else "" if parts else _value(field.get("default"))
        more = f" ([more]({SEE[full]}))" if full in SEE else ""
        rows.append((f"`{full}`", field["description"] + more, kind, default))
    yield table(("field", "meaning", "value", "default"), rows)
    for full, part, several in nested:
        if full in shown and not several:
            continue
        if full not in shown:
            shown.add(full)
            yield f"## `{full}`"
        if several:
            yield f"### `{full}`, rule `{models[part]['properties']['rule']['const']}`"
        yield _prose(models[part].get("description", ""))
        yield from _model(full, models[part], models, shown)


def _choices(field: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list(field.get("anyOf") or field.get("oneOf") or [field])


def _kind(field: Mapping[str, Any], models: Mapping[str, Any]) -> str:
    """Return in a few words which values a field takes."""
    texts = []
    for each in _choices(field):
        if "$ref" in each:
            each = models[each["$ref"].rpartition("/")[2]]
        if "enum" in each or "const" in each:
            values = each.get("enum") or [each["const"]]
            texts.append(", ".join(f"`{value}`" for value in values))
        elif each.get("type") == "array":
            texts.append(f"list of {_kind(each.get('items', {}), models)}")
        elif each.get("type") != "null":
            texts.append(_bounded(each))
    return " or ".join(dict.fromkeys(texts))


def _bounded(value: Mapping[str, Any]) -> str:
    names = {"integer": "whole number", "string": "text", "boolean": "`true`, `false`"}
    name = names.get(value.get("type", ""), value.get("type", "any"))
    if value.get("description") == "seconds":
        return "seconds"
    if examples := value.get("examples"):
        return f"text such as `{examples[-1]}`"
    low, over = value.get("minimum"), value.get("exclusiveMinimum")
    high, below = value.get("maximum"), value.get("exclusiveMaximum")
    bounds = [
        f"{word} {bound:,}"
        for word, bound in (("from", low), ("above", over), ("to", high), ("below", below))
        if bound is not None
    ]
    return " ".join([name, *bounds])


def _value(value: object) -> str:
    if value is None or value in ({}, []):
        return "none"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


# -- settings, metrics, events ------------------------------------------------------------------


def settings() -> str:
    """Return all settings of the environment."""
    rows = []
    for name, field in Settings.model_fields.items():
        default = field.default
        shown = _value(default) if default not in (None, "") else "none"
        shown = "cores, at least 3" if name == "local_capacity" else shown
        rows.append((f"`VCASGD_{name.upper()}`", shown, field.description or ""))
    return table(("variable", "default", "meaning"), sorted(rows))


def metrics() -> str:
    """Return the metrics that Prometheus reads."""
    rows = []
    for metric in empty_metrics():
        suffix = {"counter": "_total", "info": "_info"}.get(metric.type, "")
        labels = getattr(metric, "_labelnames", None) or ()
        shown = ", ".join(f"`{label}`" for label in labels)
        rows.append((f"`{metric.name}{suffix}`", metric.type, shown, metric.documentation))
    return table(("name", "type", "labels", "meaning"), rows)


def events() -> str:
    """Return all kinds of events."""
    rows = sorted((f"`{kind}`", text) for kind, text in EVENTS.items())
    return table(("kind", "meaning"), rows)


# -- commands -----------------------------------------------------------------------------------


def commands() -> str:
    """Return all commands with their arguments and options."""
    leaves = _leaves("vcasgd", typer.main.get_command(app))
    return "\n\n".join(part for each in leaves for part in _command(*each))


def _leaves(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    if not hasattr(command, "commands"):
        yield path, command
        return
    for name, child in command.commands.items():
        yield from _leaves(f"{path} {name}", child)


def _command(path: str, command: Any) -> Iterator[str]:
    context = command.context_class(command, info_name=path)
    yield f"## `{path}`"
    yield _prose(inspect.cleandoc(command.help or ""))
    usage = " ".join(command.collect_usage_pieces(context))
    yield f"```text\n{path} {usage}\n```"
    rows = []
    for parameter in command.params:
        names = ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])
        if parameter.param_type_name == "argument":
            names = f"`{parameter.metavar or parameter.name.upper()}`"
        rows.append((names, getattr(parameter, "help", None) or ""))
    if rows:
        yield table(("argument or option", "meaning"), rows)


# -- REST ---------------------------------------------------------------------------------------


def rest() -> str:
    """Return all routes and schemas of the REST API."""
    # The description needs only the routes; no connection is opened.
    ledger = connect("redis://127.0.0.1:1")
    own = Settings(token=SecretStr("not a secret, only long enough"))
    document = create_app(own, ledger, cast("Storage", None)).openapi()
    parts = []
    for tag, rows in api_page.routes(document).items():
        parts += [f"## {tag.capitalize()}", f"<div>{api_page.group(rows)}</div>"]
    schemas = sorted(document["components"]["schemas"].items())
    shown = "".join(api_page.schema(name, content) for name, content in schemas)
    return "\n\n".join([*parts, "## Schemas", f"<div>{shown}</div>"])


# -- Python -------------------------------------------------------------------------------------


def python() -> str:
    """Return the public names of the package with their docstrings."""
    names = [name for name in vcasgd.__all__ if not name.startswith("__")]
    public = {f"vcasgd.{name}": getattr(vcasgd, name) for name in names}
    public |= {"vcasgd.client.job.Job": Job, "vcasgd.data.ShardedDataset": ShardedDataset}
    return "\n\n".join(part for item in public.items() for part in _public(*item))


def _public(path: str, value: Any) -> Iterator[str]:
    name = path.rpartition(".")[2]
    yield f"## `{path}`"
    if name == "JobSpec":
        yield _prose(inspect.getdoc(value) or "") + " Its fields are those of [`job.yaml`](job.md)."
        return
    if not isinstance(value, type(BaseModel)):
        yield f"```python\n{_signature(name, value)}\n```"
    yield _prose(inspect.getdoc(value) or "")
    if not inspect.isclass(value):
        return
    if rows := list(_attributes(value)):
        yield table(("attribute", "default", "meaning"), rows)
    for key, member in vars(value).items():
        if key.startswith("_") or not (text := inspect.getdoc(_function(member))):
            continue
        yield f"### `{name}.{key}`"
        if not isinstance(member, property):
            yield f"```python\n{_signature(key, _function(member))}\n```"
        yield _prose(text)


def _attributes(value: type) -> Iterator[tuple[str, str, str]]:
    """Yield name, default, and the comment that starts with ``#:``, of a class's attributes."""
    comment: list[str] = []
    for line in inspect.getsource(value).splitlines():
        if text := re.match(r"    #: ?(.*)", line):
            comment.append(text[1])
        elif (name := re.match(r"    (\w+): ", line)) and comment:
            default = repr(getattr(value, name[1]))
            yield f"`{name[1]}`", f"`{default}`", _prose(" ".join(comment))
            comment = []
        else:
            comment = []


def _function(member: Any) -> Any:
    return getattr(member, "__func__", member)


def _signature(name: str, value: Any) -> str:
    try:
        signature = str(inspect.signature(value))
    except (TypeError, ValueError):
        return name
    plain = signature.replace("'", "")
    if len(name) + len(plain) <= 88:
        return f"{name}{plain}"
    parameters = inspect.signature(value).parameters.values()
    lines = "".join(f"    {str(each).replace(chr(39), '')},\n" for each in parameters)
    after = plain.rpartition(" -> ")[2] if " -> " in plain else ""
    return f"{name}(\n{lines})" + (f" -> {after}" if after else "")


def _prose(text: str) -> str:
    """Return a docstring as Markdown: roles and double backticks as code, blocks kept."""
    text = _ROLE.sub(lambda role: f"`{role[1].rpartition('.')[2]}`", text).replace("``", "`")
    return re.sub(r"::\n", ":\n", text)


def _slug(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


GENERATED: dict[str, Callable[[], str]] = {
    "job": job,
    "pools": pools,
    "scenario": scenario,
    "settings": settings,
    "metrics": metrics,
    "events": events,
    "commands": commands,
    "rest": rest,
    "python": python,
}

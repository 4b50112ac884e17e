"""Job files on the command line: loading with overrides, warnings about settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vcasgd.cli.output import err
from vcasgd.errors import SpecError
from vcasgd.spec.job import CHANGEABLE, JobSpec, load_job_mapping
from vcasgd.spec.problems import did_you_mean
from vcasgd.spec.update import unstable_settings
from vcasgd.spec.yaml import parse
from vcasgd.task.package import check_files


def load_job(path: Path, changes: Sequence[str] = ()) -> JobSpec:
    """Load a job file and apply ``changes`` such as ``epochs=5`` or ``update.alpha=0.9``.

    ``path`` may be the folder of a ``job.yaml``. Raises :class:`SpecError`, which names the invalid
    field or change.
    """
    if path.is_dir():
        path = path / "job.yaml"
    if path.suffix == ".py":
        raise SpecError(
            f"{path} is a script, not a job file",
            remedy=f"name a job.yaml with name, epochs, and task: {path.name}",
            field="file",
        )
    if not changes:
        return JobSpec.load(path)
    value = load_job_mapping(path)
    for change in changes:
        _apply(value, change)
    try:
        spec = JobSpec.parse(value)
    except SpecError as error:
        raise SpecError(
            f"{path}, changed by {', '.join(changes)}: {error.message}",
            remedy=_remedy(error, value.get("args")),
            **error.details,
        ) from error
    return spec.located(path.parent)


def _remedy(error: SpecError, args: object) -> str | None:
    """Return a remedy for a field that jobs don't have: it may be an argument of the task."""
    field = str(error.details.get("field"))
    if isinstance(args, Mapping) and field in args:
        return f"did you mean args.{field}?"
    if error.remedy is None or "." in field or field in JobSpec.model_fields:
        return error.remedy
    similar = did_you_mean(field, JobSpec.model_fields)
    start = f"{similar[:-1]}, or" if similar else "did you mean"
    return f"{start} the task's argument args.{field}?"


def show_warnings(spec: JobSpec) -> None:
    """Check a job's files, and print a line for each setting that may disappoint.

    Raises the errors of :func:`~vcasgd.task.package.check_files`.
    """
    for setting in (*unstable_settings(spec), *check_files(spec)):
        err.print(f"warning: {setting.field}: {setting.message}")
        err.print(f"remedy: {setting.remedy}")


def parse_changes(changes: Sequence[str]) -> dict[str, Any]:
    """Return the fields of changes such as ``priority=high`` of a job that has been submitted.

    Raises :class:`SpecError` for a field that can't change any more.
    """
    fields: dict[str, Any] = {}
    for change in changes:
        _apply(fields, change, option="")
    fixed = [name for name in fields if name not in CHANGEABLE]
    if fixed:
        raise SpecError(
            f"{fixed[0]}: can't change after the job was submitted",
            remedy=f"only {' and '.join(CHANGEABLE)} can",
            field=fixed[0],
        )
    return fields


def _apply(value: dict[str, Any], change: str, option: str = "--set ") -> None:
    name, equals, text = change.partition("=")
    *parents, last = name.strip().split(".")
    if not equals or not last:
        raise SpecError(
            f"{option}{change}: must have the form field=value",
            remedy=f"for example {option}epochs=5 or {option}args.lr=0.1"
            if option
            else "for example priority=high",
            field="set",
        )
    for parent in parents:
        value = value.setdefault(parent, {})
        if not isinstance(value, dict):
            raise SpecError(f"{option}{change}: {parent} has no fields", field=name)
    try:
        value[last] = parse(text)
    except SpecError as error:
        raise SpecError(f"{option}{change}: {error.message}", field=name) from error

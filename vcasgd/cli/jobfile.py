"""Loader for job files, with overrides from the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vcasgd.errors import SpecError
from vcasgd.spec.job import JobSpec, load_job_mapping
from vcasgd.spec.yaml import parse


def load_job(path: Path, changes: Sequence[str] = ()) -> JobSpec:
    """Load a job file and apply ``changes`` such as ``epochs=5`` or ``update.alpha=0.9``.

    Raises :class:`SpecError`, which names the invalid field or change.
    """
    if not changes:
        return JobSpec.load(path)
    value = load_job_mapping(path)
    for change in changes:
        _apply(value, change)
    try:
        spec = JobSpec.parse(value)
    except SpecError as error:
        raise SpecError(
            f"{path}, changed by --set: {error.message}", remedy=error.remedy, **error.details
        ) from error
    directory = (path.parent / spec.working_dir).resolve()
    return spec.model_copy(update={"working_dir": str(directory)})


def _apply(value: dict[str, Any], change: str) -> None:
    name, equals, text = change.partition("=")
    *parents, last = name.strip().split(".")
    if not equals or not last:
        raise SpecError(
            f"--set {change}: is not of the form field=value",
            remedy="for example --set epochs=5 or --set update.alpha=0.9",
            field="set",
        )
    for parent in parents:
        value = value.setdefault(parent, {})
        if not isinstance(value, dict):
            raise SpecError(f"--set {change}: {parent} has no fields", field=name)
    try:
        value[last] = parse(text)
    except SpecError as error:
        raise SpecError(f"--set {change}: {error.message}", field=name) from error

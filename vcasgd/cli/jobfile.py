"""A job file, with what the command line changes in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from vcasgd.errors import SpecError
from vcasgd.spec import yaml as yamltext
from vcasgd.spec.job import JobSpec


def load_job(path: Path, changes: Sequence[str] = ()) -> JobSpec:
    """The job of a file; ``changes`` are like ``epochs=5`` or ``update.alpha=0.9``.

    Raises :class:`SpecError` that names the wrong field or the wrong change.
    """
    if not changes:
        return JobSpec.load(path)
    value = _read(path)
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


def _read(path: Path) -> dict[str, Any]:
    try:
        value = yamltext.parse(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        value = None
    if not isinstance(value, dict):
        JobSpec.load(path)  # says what is wrong with it
        raise SpecError(f"{path}: holds no job", field="file")
    return value


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
            raise SpecError(f"--set {change}: {parent} has no parts", field=name)
    try:
        value[last] = yamltext.parse(text)
    except yaml.YAMLError as error:
        raise SpecError(f"--set {change}: is not YAML: {error}", field=name) from error

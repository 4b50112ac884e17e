"""Secrets of a job: their values are read on the submitter's computer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from vcasgd.errors import SpecError
from vcasgd.spec.environment import MAX_VALUE_LENGTH, SecretSource
from vcasgd.spec.job import JobSpec
from vcasgd.task.package import packed_files


def read_secrets(spec: JobSpec, given: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the values of all secrets of a job: those ``given``, else those of their sources.

    The line break at the end of a file isn't part of the value. Raises :class:`SpecError`.
    """
    given = given or {}
    return {
        name: given[name] if name in given else _checked(name, _read(name, source))
        for name, source in spec.secrets.items()
    }


def check_secret_files(spec: JobSpec) -> None:
    """Raise :class:`SpecError` if the package would contain the file of a secret."""
    files = {
        Path(source.file).resolve(): name for name, source in spec.secrets.items() if source.file
    }
    if not files:
        return
    for path in packed_files(Path(spec.working_dir)):
        if name := files.get(path.resolve()):
            raise SpecError(
                f"secrets.{name}: {path} is in working_dir, so it would be in the job's package",
                remedy="move the file, or list it in .vcasgdignore",
                field=f"secrets.{name}",
            )


def _read(name: str, source: SecretSource) -> str:
    if source.file is None:
        variable = source.env or name
        try:
            return os.environ[variable]
        except KeyError:
            raise SpecError(
                f"secrets.{name}: {variable} is not in your environment",
                remedy=f"export {variable}, or name a file: {name}: {{file: …}}",
                field=f"secrets.{name}",
            ) from None
    try:
        return Path(source.file).expanduser().read_text().removesuffix("\n")
    except (OSError, ValueError) as error:
        problem = error.strerror if isinstance(error, OSError) else "is not text"
        raise SpecError(
            f"secrets.{name}: {source.file}: {problem}", field=f"secrets.{name}"
        ) from None


def _checked(name: str, value: str) -> str:
    if value and len(value) <= MAX_VALUE_LENGTH and "\0" not in value:
        return value
    raise SpecError(
        f"secrets.{name}: has {len(value)} characters; it must have 1 to {MAX_VALUE_LENGTH}, "
        "none of which is zero",
        field=f"secrets.{name}",
    )

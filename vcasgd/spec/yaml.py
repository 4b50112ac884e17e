"""Strict loader for YAML that people write: job files, pool files, and price files.

Numbers with an exponent are those of YAML 1.2, so ``1e-3`` is one. For the rest PyYAML, with
YAML 1.1, is kept over ruamel.yaml, because 1.2 would silently change what existing files mean
(``yes``, ``on``, and octal numbers).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from yaml.events import (
    AliasEvent,
    CollectionEndEvent,
    CollectionStartEvent,
    MappingStartEvent,
    NodeEvent,
    ScalarEvent,
)

from vcasgd.errors import SpecError
from vcasgd.limits import MAX_DEPTH, MAX_DIGITS, MAX_VALUES, MAX_YAML_BYTES

#: PyYAML's packages contain libyaml, whose loader is ten times as fast.
_SAFE: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_SAFE):  # type: ignore[misc]
    """Loader that also takes ``1e-3`` and ``1.5e3`` as numbers, as YAML 1.2 does."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)
_NUMBER = re.compile(r"[-+]?[0-9.][0-9a-fA-FoxX_.:+-]*")


def load_mapping(
    source: str | Path, what: str, *, field: str = "file", remedy: str | None = None
) -> dict[str, Any]:
    """Return the mapping in a YAML file, or in YAML text.

    ``what`` names the expected content, for example ``a job``; ``field`` and ``remedy`` are those
    of the error. Raises :class:`~vcasgd.errors.SpecError`, whose message starts with the path of
    the file, if the file can't be read or isn't a mapping, and for the reasons of :func:`parse`.
    For errors in the YAML, ``details["line"]`` is the line, counted from 1.
    """
    prefix = f"{source}: " if isinstance(source, Path) else ""
    try:
        value = parse(_read(source) if isinstance(source, Path) else source)
    except OSError as error:
        raise SpecError(f"{prefix}can't be read: {error.strerror}", field=field) from error
    except UnicodeDecodeError as error:
        raise SpecError(f"{prefix}is not YAML: {error}", field=field) from error
    except SpecError as error:
        details = {**error.details, "field": field}
        raise SpecError(f"{prefix}{error.message}", remedy=error.remedy, **details) from error
    if not isinstance(value, dict):
        raise SpecError(f"{prefix}does not contain {what}", remedy=remedy, field=field)
    return value


def _read(path: Path) -> str:
    with path.open("rb") as file:
        # A byte more than is allowed, so that parse() refuses the text.
        return file.read(MAX_YAML_BYTES + 1).decode()


def parse(text: str) -> Any:
    """Return plain data from YAML text.

    Raises :class:`~vcasgd.errors.SpecError` with ``details["line"]`` if the text isn't YAML, is
    larger or nested deeper than :mod:`vcasgd.limits` allows, or has what plain data doesn't need:
    a key twice, anchors, aliases, merge keys, or tags.
    """
    if len(text.encode("utf-8", "surrogatepass")) > MAX_YAML_BYTES:
        raise SpecError(f"is longer than {MAX_YAML_BYTES / 1e3:g} kB")
    try:
        # Of untrusted text, nothing is built before all of it is known to be within the limits.
        scan = _Scan()
        for event in yaml.parse(text, _Loader):
            scan.add(event)
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        # libyaml reports the line after the last one for what is missing in the end
        line = min(mark.line, text.count("\n")) + 1 if mark else None
        problem = getattr(error, "problem", None) or "it can't be parsed"
        where = f" (line {line})" if line else ""
        raise SpecError(f"is not YAML: {problem}{where}", line=line) from error
    except (RecursionError, ValueError) as error:
        # An impossible date, or text that no file can contain.
        raise SpecError("is not YAML: a value is invalid") from error


class _Scan:
    """Checks of the events of one document."""

    def __init__(self) -> None:
        self._values = 0
        #: The open mappings, each with the lines of its keys, and None for the open lists.
        self._open: list[dict[str, int] | None] = []
        #: Whether the next value of each of them is a key.
        self._key: list[bool] = []

    def add(self, event: Any) -> None:
        """Check an event. Raises :class:`SpecError`."""
        if isinstance(event, CollectionEndEvent):
            self._open.pop(), self._key.pop()
        elif isinstance(event, NodeEvent):
            self._check(event)
            if isinstance(event, CollectionStartEvent):
                mapping = isinstance(event, MappingStartEvent)
                self._open.append({} if mapping else None)
                self._key.append(mapping)

    def _check(self, event: Any) -> None:
        self._values += 1
        if isinstance(event, AliasEvent) or event.anchor is not None:
            raise _refused(event, "anchors and aliases are not allowed", "write the value again")
        if event.tag is not None and event.tag != "!":
            raise _refused(event, f"the tag {event.tag} is not allowed", "remove it")
        if self._values > MAX_VALUES or len(self._open) > MAX_DEPTH:
            problem = f"more than {MAX_VALUES} values, or {MAX_DEPTH} levels"
            raise _refused(event, problem, "move data to a file in working_dir")
        if isinstance(event, ScalarEvent) and _is_long_number(event):
            problem = f"a number has more than {MAX_DIGITS} characters"
            raise _refused(event, problem, "put quotes around text")
        if self._open and self._open[-1] is not None:
            if self._key[-1] and isinstance(event, ScalarEvent):
                _check_key(event, self._open[-1])
            self._key[-1] = not self._key[-1]


def _is_long_number(event: Any) -> bool:
    return len(event.value) > MAX_DIGITS and bool(
        event.implicit[0] and _NUMBER.fullmatch(event.value)
    )


def _check_key(event: Any, lines: dict[str, int]) -> None:
    if event.value == "<<" and event.implicit[0]:
        raise _refused(event, "merge keys are not allowed", "write the fields again")
    if event.value in lines:
        problem = f"duplicate key {event.value}, first in line {lines[event.value]}"
        raise _refused(event, problem, "remove one of them")
    lines[event.value] = event.start_mark.line + 1


def _refused(event: Any, problem: str, remedy: str) -> SpecError:
    line = event.start_mark.line + 1
    return SpecError(f"is refused: {problem} (line {line})", remedy=remedy, line=line)

"""Strict loader for YAML that people write: job files, pool files, and price files.

PyYAML is kept over ruamel.yaml: rejecting duplicate keys takes one short class here, whereas YAML
1.2 would silently change what existing files mean (``yes``, ``on``, ``1e3``, and octal numbers).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from yaml.composer import ComposerError

from vcasgd.errors import SpecError

#: ``<<`` may occur several times in one mapping.
_MERGE = "tag:yaml.org,2002:merge"


def load_mapping(
    source: str | Path, what: str, *, field: str = "file", remedy: str | None = None
) -> dict[str, Any]:
    """Return the mapping in a YAML file, or in YAML text.

    ``what`` names the expected content, for example ``a job``; ``field`` and ``remedy`` are those
    of the error. Raises :class:`~vcasgd.errors.SpecError`, whose message starts with the path of
    the file, if the file can't be read, isn't YAML, repeats a key, or isn't a mapping. For errors
    in the YAML, ``details["line"]`` is the line, counted from 1.
    """
    prefix = f"{source}: " if isinstance(source, Path) else ""
    try:
        value = parse(source.read_text() if isinstance(source, Path) else source)
    except OSError as error:
        raise SpecError(f"{prefix}can't be read: {error.strerror}", field=field) from error
    except UnicodeDecodeError as error:
        raise SpecError(f"{prefix}is not YAML: {error}", field=field) from error
    except SpecError as error:
        raise SpecError(f"{prefix}{error.message}", **{**error.details, "field": field}) from error
    if not isinstance(value, dict):
        raise SpecError(f"{prefix}does not contain {what}", remedy=remedy, field=field)
    return value


def parse(text: str) -> Any:
    """Return plain data from YAML text.

    Raises :class:`~vcasgd.errors.SpecError` with ``details["line"]`` if the text isn't YAML or a
    mapping has a key twice.
    """
    try:
        return yaml.load(text, _StrictLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else None
        problem = getattr(error, "problem", None) or "it can't be parsed"
        where = f" (line {line})" if line else ""
        raise SpecError(f"is not YAML: {problem}{where}", line=line) from error
    except (RecursionError, ValueError) as error:
        # An impossible date, or brackets nested too deeply.
        raise SpecError("is not YAML: a value is invalid or nested too deeply") from error


class _StrictLoader(yaml.SafeLoader):
    """Loader that rejects duplicate keys, as YAML 1.2 (section 3.2.1.3) requires.

    PyYAML takes the last one.
    """

    # Each node is composed once, and before the keys of a merge are added to it.
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            if key.value in lines:
                problem = f"duplicate key {key.value}, first in line {lines[key.value]}"
                raise ComposerError(None, None, problem, key.start_mark)
            lines[key.value] = key.start_mark.line + 1
        return node

"""YAML as people write it: of a field that is there twice, nobody knows which one was meant."""

from __future__ import annotations

from typing import Any

import yaml
from yaml.composer import ComposerError

#: ``<<`` may be there several times
_MERGE = "tag:yaml.org,2002:merge"


def parse(text: str) -> Any:
    """Plain data. Raises :class:`yaml.YAMLError`, also where a mapping has a key twice."""
    return yaml.load(text, _Strict)


class _Strict(yaml.SafeLoader):
    """PyYAML takes the last of two equal keys, against YAML 1.2 (section 3.2.1.3)."""

    # nodes are composed once each, and before what a merge brings is among their keys
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            if key.value in seen:
                problem = f"{key.value} is there twice, first in line {seen[key.value]}"
                raise ComposerError(None, None, problem, key.start_mark)
            seen[key.value] = key.start_mark.line + 1
        return node

"""Headers of updates."""

from __future__ import annotations

from typing import Any

from vcasgd.store.tensors.header import Header


def header_of(**changes: Any) -> Header:
    """Return the header of an update of one worker, which starts at sample 0."""
    fields = {
        "update": f"w.1.{changes.get('start', 0)}",
        "worker": "w",
        "subtask": 0,
        "start": 0,
        "stop": 2,
        "base": 0,
        "token": 1,
        "codec": "float32",
        "size": 12,
        "layout": "l",
    }
    return Header(**{**fields, **changes})

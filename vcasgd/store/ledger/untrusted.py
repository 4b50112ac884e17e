"""What workers wrote of their job, read as what anybody might have written.

A worker can put anything under the keys that it may write. What can't be read is left out, so
that it spoils no more than the job that it belongs to.
"""

from __future__ import annotations

import re

#: of a worker; such a name can stand in a key, in a pattern and in the name of a user
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")


def as_count(text: bytes | None) -> int:
    """A number; 0 where it is anything else."""
    try:
        return int(text or 0)
    except ValueError:
        return 0


def as_name(text: bytes) -> str | None:
    """The name of a worker; None where it can't be one."""
    name = text.decode(errors="replace")
    return name if _NAME.fullmatch(name) else None

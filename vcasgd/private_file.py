"""Files that only their owner can read."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_private(path: Path, content: str | bytes) -> None:
    """Replace a file atomically; only its owner can read it."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        Path(name).replace(path)
    finally:
        # Only there if it didn't take the place of the other one.
        Path(name).unlink(missing_ok=True)

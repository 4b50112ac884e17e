"""Readers of the files of experiment trackers."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def tensorboard_files(folder: Path | str) -> Any:
    """Return the event files of TensorBoard in a folder, as its ``EventAccumulator``."""
    # Imported here, because each process of the tests would wait for it.
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    files = EventAccumulator(str(folder))
    files.Reload()
    return files

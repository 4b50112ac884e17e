"""Path of the job's base on this machine, for the user's code."""

from __future__ import annotations

from pathlib import Path

from vcasgd.errors import SpecError

_path: Path | None = None


def use_base(path: Path | None) -> None:
    """Set the base of the job that this process works for; None if it has none."""
    global _path
    _path = path


def base(default: str | Path | None = None) -> Path:
    """Return the file or folder that ``base`` in the job file names, on this machine.

    Its digest is verified. Outside a job, and in a job without a base, this is ``default``. Raises
    :class:`SpecError` if there is neither.
    """
    if _path is not None:
        return _path
    if default is None:
        raise SpecError(
            "base: there is none",
            remedy="name its location and sha256 under base in the job file",
            field="base",
        )
    return Path(default)

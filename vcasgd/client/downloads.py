"""Files from the API: whole or not at all."""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path

import httpx

from vcasgd.errors import CheckpointDamaged


def save(response: httpx.Response, path: Path) -> Path:
    """Writes a streamed answer to a file, or into a directory under the name that it carries.

    The file appears when all of it has arrived and its digest is right. Raises
    :class:`CheckpointDamaged`, and :class:`OSError` where it can't be written.
    """
    target = path / _name(response) if path.is_dir() else path
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        _check(response, _copy(response, part))
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    return target


def _copy(response: httpx.Response, path: Path) -> str:
    """Returns the digest of what was written."""
    digest = hashlib.sha256()
    with path.open("xb") as file:
        for part in response.iter_bytes():
            digest.update(part)
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _check(response: httpx.Response, digest: str) -> None:
    promised = response.headers.get("etag", "").strip('"')
    if digest != promised:
        raise CheckpointDamaged(
            f"{_name(response)} arrived damaged: its digest does not match",
            remedy="download it again",
        )


def _name(response: httpx.Response) -> str:
    """The name in ``Content-Disposition``, without any folders."""
    _, _, name = response.headers.get("content-disposition", "").partition("filename=")
    return Path(name.strip('"')).name or "model.safetensors"

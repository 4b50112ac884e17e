"""The API of a client whose caller names none: the configured one, or that of the local stack."""

from __future__ import annotations

import json
from pathlib import Path

from vcasgd.errors import StackError, Unauthorized
from vcasgd.fleet.providers.local.machine import is_locked
from vcasgd.settings import Settings


def find_api(url: str | None, token: str | None, settings: Settings) -> tuple[str, str]:
    """Return the URL and the token of the API that the arguments, the settings, or the local stack
    name, in this order.

    Raises :class:`StackError` if there is no API to connect to, and :class:`Unauthorized` if
    there is no token for it.
    """
    home = settings.home_path
    if url is None:
        url = settings.api_url if "api_url" in settings.model_fields_set else _running(home)
    if token is None and settings.token is not None:
        token = settings.token.get_secret_value()
    # The local stack's token is never sent to another host.
    if token is None and _stored_url(home) == url.rstrip("/"):
        token = _text(home / "token")
    if not token:
        raise Unauthorized(f"no token for {url}", remedy="set VCASGD_TOKEN, or use --token")
    return url, token


def _running(home: Path) -> str:
    url = _stored_url(home)
    if url is None:
        raise StackError(f"there is no stack in {home}", remedy="start one with: vcasgd up")
    if not is_locked(home / "stack.lock"):
        raise StackError(
            f"the stack in {home} is not running",
            remedy="start it with vcasgd up, or use --url to name another API",
        )
    return url


def _stored_url(home: Path) -> str | None:
    """Return the address that the stack in a home wrote last; None if there is none."""
    try:
        url = json.loads(_text(home / "stack.json") or "{}").get("api_url")
    except (ValueError, AttributeError):
        return None
    return url if isinstance(url, str) else None


def _text(file: Path) -> str | None:
    try:
        return file.read_text().strip()
    except OSError:
        return None

"""Options and lookup for the API address and token."""

from __future__ import annotations

from typing import Annotated

import typer

from vcasgd.client import Client
from vcasgd.errors import StackError, Unauthorized
from vcasgd.settings import Settings, load_settings
from vcasgd.stack import StackHome, StackState, is_running

Url = Annotated[
    str | None,
    typer.Option("--url", help="API URL (default: $VCASGD_API_URL, then the local stack)."),
]
Token = Annotated[
    str | None,
    typer.Option("--token", help="API token. Prefer $VCASGD_TOKEN, which ps does not show."),
]


def open_client(url: str | None, token: str | None, settings: Settings | None = None) -> Client:
    """Return a client for the API that the options, the environment or the local stack name.

    They are tried in this order.

    Raises :class:`StackError` if there is no API to connect to, and :class:`Unauthorized` if
    there is no token for it.
    """
    settings = settings or load_settings()
    url = url or _configured_url(settings) or _local_url(settings)
    return Client(url, token or _token(settings, url))


def _configured_url(settings: Settings) -> str | None:
    return settings.api_url if "api_url" in settings.model_fields_set else None


def _local_url(settings: Settings) -> str:
    state = StackState.read(settings.home_path)
    if not is_running(settings.home_path):
        raise StackError(
            f"the stack in {settings.home_path} is not running",
            remedy="start it with vcasgd up, or use --url to name another API",
        )
    return state.api_url


def _token(settings: Settings, url: str) -> str:
    if settings.token is not None:
        return settings.token.get_secret_value()
    # The local stack's token is never sent to another host.
    token = StackHome(settings.home).token() if _is_local(settings, url) else None
    if token is None:
        raise Unauthorized(f"no token for {url}", remedy="set VCASGD_TOKEN, or use --token")
    return token


def _is_local(settings: Settings, url: str) -> bool:
    try:
        return StackState.read(settings.home_path).api_url == url.rstrip("/")
    except StackError:
        return False

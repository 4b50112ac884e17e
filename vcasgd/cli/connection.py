"""Which API to talk to, and with which token."""

from __future__ import annotations

from typing import Annotated

import typer

from vcasgd.client import Client
from vcasgd.errors import StackError, Unauthorized
from vcasgd.settings import Settings, load_settings
from vcasgd.stack import StackHome, StackState, is_running

Url = Annotated[
    str | None, typer.Option("--url", help="Of the API; else VCASGD_API_URL, else our own stack.")
]
Token = Annotated[
    str | None, typer.Option("--token", help="Of the API; better given as VCASGD_TOKEN.")
]


def open_client(url: str | None, token: str | None, settings: Settings | None = None) -> Client:
    """A client for what the options, the environment or the local stack say, in this order.

    Raises :class:`StackError` where there is nothing to talk to, and :class:`Unauthorized`
    where no token is known.
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
            remedy="start it with vcasgd up, or name another API with --url",
        )
    return state.api_url


def _token(settings: Settings, url: str) -> str:
    if settings.token is not None:
        return settings.token.get_secret_value()
    token = StackHome(settings.home).token() if _is_ours(settings, url) else None
    if token is None:
        raise Unauthorized(f"no token for {url}", remedy="set VCASGD_TOKEN, or use --token")
    return token


def _is_ours(settings: Settings, url: str) -> bool:
    """The local stack's token goes to the local stack and to nobody else."""
    try:
        return StackState.read(settings.home_path).api_url == url.rstrip("/")
    except StackError:
        return False

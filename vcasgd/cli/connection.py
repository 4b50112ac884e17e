"""Options for the API address and token."""

from __future__ import annotations

from typing import Annotated

import typer

from vcasgd.client import Client
from vcasgd.client.transport import find_api
from vcasgd.settings import Settings, load_settings

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

    Raises the errors of :func:`~vcasgd.client.transport.find_api`.
    """
    return Client(*find_api(url, token, settings or load_settings()))

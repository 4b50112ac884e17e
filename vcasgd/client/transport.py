"""Requests to the API: the token, the limits, and errors that are ours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

import httpx

from vcasgd.client.following import Open, follow, messages
from vcasgd.client.problems import mapped_errors, raise_for_problem
from vcasgd.client.views import Row
from vcasgd.errors import ApiError, SpecError

#: entries asked for at once where a listing has many
PAGE = 1000
#: while a stream is open, the API sends a sign of life far more often than this
SILENCE_SECONDS = 30.0
#: the API may have to fetch a file from far away, or to bring it there, before it answers
FILE_SECONDS = 300.0

_EVENT_STREAM = {"Accept": "text/event-stream"}


class Transport:
    """Raises :class:`~vcasgd.errors.ApiError` and its kin, never an error of httpx."""

    def __init__(self, url: str, token: str, timeout: float) -> None:
        self._timeout = timeout
        self.url = _without_secret(url)
        with mapped_errors(self.url):
            # proxies and certificates named by the environment would be settings in disguise
            self._http = httpx.Client(
                base_url=f"{url.rstrip('/')}/api/v1/",
                headers={"Authorization": f"Bearer {_checked(token)}"},
                timeout=timeout,
                trust_env=False,
            )

    def close(self) -> None:
        self._http.close()

    def call(self, method: str, path: str, **options: Any) -> httpx.Response:
        with mapped_errors(self.url):
            response = self._http.request(method, path, **options)
        raise_for_problem(response)
        return response

    def json(self, method: str, path: str, **options: Any) -> Any:
        response = self.call(method, path, **options)
        try:
            return response.json()
        except ValueError as error:
            raise ApiError(
                f"{self.url} answered with something else than JSON",
                remedy="is this the address of the API?",
                status=response.status_code,
            ) from error

    @contextmanager
    def stream(
        self,
        path: str,
        headers: dict[str, str] | None = None,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> Iterator[httpx.Response]:
        """An answer whose body is read bit by bit."""
        timeout = httpx.Timeout(self._timeout, read=silence_seconds)
        with (
            mapped_errors(self.url),
            self._http.stream("GET", path, headers=headers, timeout=timeout) as response,
        ):
            if not response.is_success:
                response.read()
                raise_for_problem(response)
            yield response

    def rows(self, path: str, **query: Any) -> list[Row]:
        given = {name: value for name, value in query.items() if value is not None}
        rows: list[Row] = self.json("GET", path, params=given)
        return rows

    def row(self, path: str, **query: Any) -> Row:
        given = {name: value for name, value in query.items() if value is not None}
        row: Row = self.json("GET", path, params=given)
        return row

    def pages(self, path: str, after: str | None, **query: Any) -> Iterator[Row]:
        """All entries of a listing that is handed out in pages."""
        while True:
            rows = self.rows(path, after=after, limit=PAGE, **query)
            yield from rows
            if len(rows) < PAGE:
                return
            after = rows[-1]["id"]

    def history(
        self, path: str, after: str | None, following: bool, patience: float
    ) -> Iterator[Row]:
        """The entries that there are, or with ``following`` those to come as well."""
        if not following:
            return self.pages(path, after)
        return follow(self._opener(path), after, patience)

    def changes(self, path: str, after: str | None, patience: float) -> Iterator[tuple[str, Row]]:
        """The types and the data of a stream that has no end."""
        for message in messages(self._opener(path), after, patience):
            yield message.event, json.loads(message.data)

    def _opener(self, path: str) -> Open:
        def open_after(last: str | None) -> AbstractContextManager[httpx.Response]:
            resume = {"Last-Event-ID": last} if last else {}
            return self.stream(path, {**_EVENT_STREAM, **resume})

        return open_after


def path_of(*parts: str) -> str:
    """A path whose parts stay what they are, slashes and question marks included."""
    return "/".join(quote(part, safe="") for part in parts)


def _without_secret(url: str) -> str:
    """The URL as it may be shown: no user, no password."""
    parts = urlsplit(url.rstrip("/"))
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _checked(token: str) -> str:
    """Raises :class:`SpecError`, before any library quotes the token in an error of its own."""
    token = token.strip()
    if not token or not token.isascii() or not token.isprintable():
        raise SpecError("the token is empty or holds characters that no header can carry")
    return token

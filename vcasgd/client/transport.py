"""Requests to the API with its token and timeouts; raises vcasgd's own errors."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import ssl
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast
from urllib.parse import quote, urlsplit, urlunsplit

import httpx
from pydantic import TypeAdapter, ValidationError

from vcasgd.client.following import OpenStream, retried
from vcasgd.client.problems import mapped_errors, raise_for_problem, was_busy
from vcasgd.errors import ApiError, CheckpointDamaged, SpecError, StackError, Unauthorized
from vcasgd.fleet.providers.local.machine import is_locked
from vcasgd.settings import Settings
from vcasgd.spec.problems import first_mistake

#: Entries per request to a long listing.
PAGE = 1000
#: Timeout in seconds for files, which the API may have to transfer from or to a remote storage.
FILE_SECONDS = 300.0
#: Seconds for which a request is repeated that the API has not seen.
BUSY_SECONDS = 15.0

_EVENT_STREAM = {"Accept": "text/event-stream"}


class _Entry(Protocol):
    @property
    def id(self) -> str: ...


Result = TypeVar("Result")
Entry = TypeVar("Entry", bound=_Entry)


class Transport:
    """HTTP connections to one API.

    Methods raise :class:`~vcasgd.errors.ApiError` and its subclasses, never errors of httpx.
    """

    def __init__(
        self,
        url: str,
        token: str,
        timeout: float,
        ca_file: Path | None = None,
        tls: ssl.SSLContext | None = None,
        headers: Mapping[str, str] | None = None,
        home: Path | None = None,
    ) -> None:
        """Connect at the first request. ``tls`` replaces the usual trust and ``ca_file``.

        ``home``: that of the stack, if it is on this machine.
        """
        self._timeout, self._home = timeout, home
        self.url = _without_password(url)
        https = url.lower().startswith("https:")
        verify = tls or trusted(ca_file) if https else True
        with mapped_errors(self.url):
            # trust_env would take proxies from the environment
            self._http = httpx.Client(
                base_url=f"{url.rstrip('/')}/api/v1/",
                headers={"Authorization": f"Bearer {_checked(token)}", **(headers or {})},
                timeout=timeout,
                verify=verify,
                trust_env=False,
            )

    def close(self) -> None:
        self._http.close()

    def call(
        self, method: str, path: str, *, patience: float = BUSY_SECONDS, **options: Any
    ) -> httpx.Response:
        """Send a request and return its successful response.

        A request that the API refuses because the token has too many in progress, or that meets
        the restart of a local one, is sent again for ``patience`` seconds. Raises
        :class:`SpecError` for what no request can contain.
        """

        def send() -> httpx.Response:
            try:
                with mapped_errors(self.url, self._home):
                    response = self._http.request(method, path, **options)
            except ValueError as error:  # such as an infinite number, or a header with an umlaut
                raise SpecError(f"the request can't be sent: {error}") from error
            raise_for_problem(response)
            return response

        return retried(send, patience, was_busy)

    def get(
        self, kind: type[Result], path: str, *, patience: float = BUSY_SECONDS, **query: Any
    ) -> Result:
        """Return the resource at ``path``. Query parameters that are None are left out."""
        params = {name: value for name, value in query.items() if value is not None}
        return self._parsed(kind, self.call("GET", path, patience=patience, params=params))

    def post(self, kind: type[Result], path: str, body: Any = None, **options: Any) -> Result:
        """Send ``body`` as JSON, unless it is None, and return the result."""
        if body is not None:
            options["json"] = body
        return self._parsed(kind, self.call("POST", path, **options))

    def patch(self, kind: type[Result], path: str, body: Any) -> Result:
        """Change the resource at ``path``, and return it."""
        return self._parsed(kind, self.call("PATCH", path, json=body))

    def pages(
        self, kind: type[Entry], path: str, after: str | None, **query: Any
    ) -> Iterator[Entry]:
        """Yield all entries of a long listing after an ID."""
        while True:
            entries = self.get(_list_of(kind), path, after=after, limit=PAGE, **query)
            yield from entries
            if len(entries) < PAGE:
                return
            after = entries[-1].id

    def linked_pages(self, kind: type[Result], path: str, **query: Any) -> Iterator[Result]:
        """Yield all entries of a long listing whose responses link to the next page."""
        params = {name: value for name, value in query.items() if value is not None}
        response = self.call("GET", path, params=params)
        while True:
            yield from self._parsed(_list_of(kind), response)
            following = response.links.get("next", {}).get("url")
            if following is None:
                return
            response = self.call("GET", following)

    def event_stream(self, path: str, **query: Any) -> OpenStream:
        """Return a function that opens the event stream at ``path``."""
        if params := {name: value for name, value in query.items() if value is not None}:
            path = f"{path}?{httpx.QueryParams(params)}"

        def open_stream(
            after: str | None, read_timeout: float
        ) -> AbstractContextManager[httpx.Response]:
            resume = {"Last-Event-ID": after} if after else {}
            return self._stream(path, {**_EVENT_STREAM, **resume}, read_timeout)

        return open_stream

    def download(self, path: str, target: Path) -> Path:
        """Download a file to ``target``, or into that folder under the file's own name.

        The file appears once it is complete and its SHA-256 matches the ``ETag``. Raises
        :class:`CheckpointDamaged`, and :class:`OSError` if the file can't be written.
        """
        with self._stream(path, {}, FILE_SECONDS) as response:
            target = target / _file_name(response) if target.is_dir() else target
            part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
            try:
                _save(response, part)
                part.replace(target)
            except httpx.TransportError as error:
                size = response.num_bytes_downloaded
                raise ApiError(
                    f"{_file_name(response)} ended early, after {size} bytes",
                    remedy="download it again; if it ends early again, it is damaged in the "
                    "storage: choose another checkpoint",
                ) from error
            finally:
                part.unlink(missing_ok=True)
        return target

    @contextmanager
    def _stream(
        self, path: str, headers: dict[str, str], read_timeout: float
    ) -> Iterator[httpx.Response]:
        timeout = httpx.Timeout(self._timeout, read=read_timeout)
        with (
            mapped_errors(self.url, self._home),
            self._http.stream("GET", path, headers=headers, timeout=timeout) as response,
        ):
            if not response.is_success:
                response.read()
                raise_for_problem(response)
            yield response

    def _parsed(self, kind: type[Result], response: httpx.Response) -> Result:
        try:
            result: Result = _adapter(cast("Any", kind)).validate_json(response.content)
        except ValidationError as error:
            raise ApiError(
                f"{self.url} sent an unexpected response: {first_mistake(error, 'all of it')}",
                remedy="check that this is the address of the API, and of the client's version",
                status=response.status_code,
            ) from error
        return result


def trusted(ca_file: Path | None) -> ssl.SSLContext:
    """Return a TLS configuration that trusts well-known authorities and those in ``ca_file``.

    ``SSL_CERT_FILE`` and ``SSL_CERT_DIR`` replace the well-known ones. Raises :class:`SpecError`.
    """
    try:
        context = httpx.create_ssl_context(trust_env=True)
    except OSError as error:
        raise SpecError(f"SSL_CERT_FILE: {error}", field="SSL_CERT_FILE") from error
    if ca_file is not None:
        try:
            context.load_verify_locations(ca_file.expanduser())
        except OSError as error:
            raise SpecError(
                f"VCASGD_CA_FILE: {ca_file} is not a readable PEM certificate file: {error}",
                remedy="fetch the API's certificate with certificate_command of terraform output",
                field="VCASGD_CA_FILE",
            ) from error
    return context


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _list_of(kind: type[Result]) -> type[list[Result]]:
    return list[kind]  # type: ignore[valid-type]


def path_of(*parts: str) -> str:
    """Return a path in which slashes and question marks within ``parts`` are escaped."""
    return "/".join(quote(part, safe="") for part in parts)


def _without_password(url: str) -> str:
    """Return the URL without user and password, for messages. Raises :class:`ApiError`."""
    try:
        parts = urlsplit(url.rstrip("/"))
    except ValueError as error:
        raise ApiError(f"the URL of the API is invalid: {error}") from error
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _checked(token: str) -> str:
    """Return the token. Raise :class:`SpecError` before a library quotes it in an error."""
    token = token.strip()
    if not token or not token.isascii() or not token.isprintable():
        raise SpecError("the token is empty or contains characters that a header can't contain")
    return token


def _save(response: httpx.Response, path: Path) -> None:
    """Write the body to a new file and check its digest."""
    digest = hashlib.sha256()
    with path.open("xb") as file:
        for part in response.iter_bytes():
            digest.update(part)
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    if digest.hexdigest() != response.headers.get("etag", "").strip('"'):
        raise CheckpointDamaged(
            f"{_file_name(response)} arrived damaged: digest mismatch",
            remedy="download it again",
        )


def _file_name(response: httpx.Response) -> str:
    """Return the name in ``Content-Disposition`` without folders."""
    _, _, name = response.headers.get("content-disposition", "").partition("filename=")
    return Path(name.strip('"')).name or "model.safetensors"


# -- the API of a client whose caller names none ------------------------------------------------


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
    if token is None and local_home(url, settings):
        token = _text(home / "token")
    if token is None:
        raise Unauthorized(
            f"no token for {url}",
            remedy="set VCASGD_TOKEN, or use --token; an administrator has vcasgd token create",
        )
    return url, token


def local_home(url: str, settings: Settings) -> Path | None:
    """Return the home of the user's stack if its API has this address."""
    return settings.home_path if _stored_url(settings.home_path) == url.rstrip("/") else None


def _running(home: Path) -> str:
    url = _stored_url(home)
    if url is None:
        raise StackError(
            f"there is no stack in {home}",
            remedy="start one with: vcasgd up; or name another API with --url or VCASGD_API_URL",
        )
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

"""The metadata server of a cloud's machine: who the machine is, and how it is asked.

AWS: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instancedata-data-retrieval.html
GCP: https://cloud.google.com/compute/docs/metadata/querying-metadata
"""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Protocol

from vcasgd.errors import CloudUnavailable

AWS_URL = "http://169.254.169.254"
GCP_URL = "http://metadata.google.internal"
#: for one request; the server is on the same host, so it answers in milliseconds, after a wait
#: that was asked for, or not at all
TIMEOUT_SECONDS = 4.0
#: of an AWS session token, and how much earlier a new one is asked for
TOKEN_TTL_SECONDS = 21_600
TOKEN_RENEWAL_SECONDS = 600
#: without it Google's server refuses, so that no browser can be made to ask
GCP_HEADERS = {"Metadata-Flavor": "Google"}


@dataclass(frozen=True)
class Response:
    status: int
    body: str
    etag: str = field(default="", compare=False)


class Http(Protocol):
    def __call__(self, method: str, url: str, headers: Mapping[str, str]) -> Response:
        """Raises :class:`OSError` when there is no answer in time."""
        ...


def request(method: str, url: str, headers: Mapping[str, str]) -> Response:
    """Straight to the server: metadata is local to the host and no business of a proxy."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        wanted = urllib.request.Request(url, method=method, headers=dict(headers))
        with opener.open(wanted, timeout=TIMEOUT_SECONDS) as answer:
            body = answer.read().decode(errors="replace")
            return Response(answer.status, body, answer.headers.get("ETag", ""))
    except urllib.error.HTTPError as error:
        with error:
            return Response(error.code, "")
    except (HTTPException, ValueError) as error:  # no HTTP, or no such address
        raise ConnectionError(f"{url}: {error!r}") from error


class AwsMetadata:
    """Speaks IMDSv2, the only version that can't be switched off; its token is kept and renewed."""

    def __init__(
        self, url: str = AWS_URL, http: Http = request, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._url = url.rstrip("/")
        self._http = http
        self._clock = clock
        self._token: str | None = None
        self._token_until = 0.0

    def get(self, path: str) -> Response:
        """Raises :class:`OSError` when there is no answer in time."""
        response = self._get(path)
        if response.status == 401:
            self._token = None
            response = self._get(path)
        return response

    def _get(self, path: str) -> Response:
        headers = {"X-aws-ec2-metadata-token": self._fresh_token()}
        return self._http("GET", self._url + path, headers)

    def _fresh_token(self) -> str:
        if self._token is None or self._clock() >= self._token_until:
            asked_at = self._clock()
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_TTL_SECONDS)}
            response = self._http("PUT", f"{self._url}/latest/api/token", headers)
            if response.status != 200:
                raise ConnectionError(f"no session token: status {response.status}")
            self._token = response.body
            self._token_until = asked_at + TOKEN_TTL_SECONDS - TOKEN_RENEWAL_SECONDS
        return self._token


def gcp_value(path: str, url: str = GCP_URL, http: Http = request) -> Response:
    """Raises :class:`OSError` when there is no answer in time."""
    return http("GET", f"{url.rstrip('/')}/computeMetadata/v1/instance/{path}", GCP_HEADERS)


def identity(kind: str, url: str | None, http: Http = request) -> str:
    """The id of this machine, as its provider calls it. ``kind`` is ``aws`` or ``gcp``.

    Raises :class:`~vcasgd.errors.CloudUnavailable` when nobody tells.
    """
    try:
        if kind == "gcp":
            response = gcp_value("name", url or GCP_URL, http)
        else:
            response = AwsMetadata(url or AWS_URL, http).get("/latest/meta-data/instance-id")
    except OSError as error:
        raise CloudUnavailable(f"the metadata server does not answer: {error}") from error
    if response.status != 200 or not response.body.strip():
        raise CloudUnavailable(f"the metadata server does not know us: status {response.status}")
    return response.body.strip()

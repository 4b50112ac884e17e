"""Clients for what a machine in a cloud asks for itself: its metadata, and its secrets.

AWS: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instancedata-data-retrieval.html
GCP: https://cloud.google.com/compute/docs/metadata/querying-metadata
"""

from __future__ import annotations

import base64
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Protocol

from vcasgd.errors import CloudDenied, CloudUnavailable

#: Address of AWS's metadata server.
AWS_URL = "http://169.254.169.254"
#: Address of Google's metadata server.
GCP_URL = "http://metadata.google.internal"
#: Address of Google's Secret Manager.
SECRET_MANAGER_URL = "https://secretmanager.googleapis.com"
#: Time limit of a request. The server is on the same host, so it responds within milliseconds,
#: after a requested wait, or not at all.
TIMEOUT_SECONDS = 4.0
#: Lifetime of an AWS session token, and how much earlier it is renewed.
TOKEN_TTL_SECONDS = 21_600
TOKEN_RENEWAL_SECONDS = 600
#: Header that Google's server requires, which protects it from requests by browsers.
GCP_HEADERS = {"Metadata-Flavor": "Google"}


@dataclass(frozen=True)
class Response:
    """Response to an HTTP request."""

    status: int
    body: str
    etag: str = field(default="", compare=False)


class Http(Protocol):
    """Function that makes an HTTP request."""

    def __call__(self, method: str, url: str, headers: Mapping[str, str]) -> Response:
        """Make a request. Raises :class:`OSError` without a response in time."""
        ...


def request(method: str, url: str, headers: Mapping[str, str]) -> Response:
    """Make a request without a proxy, because the server is local to the host."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        prepared = urllib.request.Request(url, method=method, headers=dict(headers))
        with opener.open(prepared, timeout=TIMEOUT_SECONDS) as answer:
            body = answer.read().decode(errors="replace")
            return Response(answer.status, body, answer.headers.get("ETag", ""))
    except urllib.error.HTTPError as error:
        with error:
            return Response(error.code, "")
    except (HTTPException, ValueError) as error:  # Not HTTP, or an invalid address.
        raise ConnectionError(f"{url}: {error!r}") from error


class AwsMetadata:
    """Client for IMDSv2, the only version that can't be disabled.

    It caches and renews its token.
    """

    def __init__(
        self, url: str = AWS_URL, http: Http = request, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._url = url.rstrip("/")
        self._http = http
        self._clock = clock
        self._token: str | None = None
        self._token_until = 0.0

    def get(self, path: str) -> Response:
        """Get a path. Raises :class:`OSError` without a response in time."""
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
            requested_at = self._clock()
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_TTL_SECONDS)}
            response = self._http("PUT", f"{self._url}/latest/api/token", headers)
            if response.status != 200:
                raise ConnectionError(f"no session token: status {response.status}")
            self._token = response.body
            self._token_until = requested_at + TOKEN_TTL_SECONDS - TOKEN_RENEWAL_SECONDS
        return self._token


def gcp_value(path: str, url: str = GCP_URL, http: Http = request) -> Response:
    """Get a value from Google's server. Raises :class:`OSError` without a response in time."""
    return http("GET", f"{url.rstrip('/')}/computeMetadata/v1/instance/{path}", GCP_HEADERS)


def identity(kind: str, url: str | None, http: Http = request) -> str:
    """Return the id of this machine at its provider. ``kind`` is ``aws`` or ``gcp``.

    Raises :class:`~vcasgd.errors.CloudUnavailable` without a valid response.
    """
    try:
        if kind == "gcp":
            response = gcp_value("name", url or GCP_URL, http)
        else:
            response = AwsMetadata(url or AWS_URL, http).get("/latest/meta-data/instance-id")
    except OSError as error:
        raise CloudUnavailable(f"the metadata server does not respond: {error}") from error
    if response.status != 200 or not response.body.strip():
        raise CloudUnavailable(f"the metadata server returned no id: status {response.status}")
    return response.body.strip()


def aws_secret(name: str, region: str) -> str:
    """Return a value from AWS Secrets Manager. Raises :class:`~vcasgd.errors.FleetError`."""
    # Imported here: it needs boto3, which only machines in AWS have.
    from vcasgd.fleet.providers.aws.calls import secret

    return secret(name, region)


def gcp_secret(
    name: str, metadata_url: str | None, url: str = SECRET_MANAGER_URL, http: Http = request
) -> str:
    """Return a value from Google's Secret Manager, with the machine's service account.

    ``name`` is ``projects/<project>/secrets/<name>``. Raises :class:`CloudUnavailable` and
    :class:`CloudDenied`.
    """
    path = "service-accounts/default/token"
    try:
        response = gcp_value(path, metadata_url or GCP_URL, http)
        token = json.loads(response.body)["access_token"]
        secret_request = urllib.request.Request(
            f"{url}/v1/{name}/versions/latest:access", headers={"Authorization": f"Bearer {token}"}
        )
        with urllib.request.urlopen(secret_request, timeout=TIMEOUT_SECONDS) as answer:
            payload = json.load(answer)["payload"]["data"]
    except urllib.error.HTTPError as error:
        with error:
            kind = CloudUnavailable if error.code >= 500 else CloudDenied
            raise kind(f"secret {name}: status {error.code}") from error
    except (OSError, ValueError, LookupError) as error:
        raise CloudUnavailable(f"secret {name}: {type(error).__name__}") from error
    return base64.b64decode(payload).decode()

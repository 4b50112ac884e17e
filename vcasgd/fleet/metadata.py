"""Clients for what a machine in a cloud asks for itself: its metadata, and its secrets.

AWS: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instancedata-data-retrieval.html
GCP: https://cloud.google.com/compute/docs/metadata/querying-metadata
"""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPException

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
#: Lifetime of an AWS session token.
TOKEN_TTL_SECONDS = 21_600
#: Header that Google's server requires, which protects it from requests by browsers.
GCP_HEADERS = {"Metadata-Flavor": "Google"}


@dataclass(frozen=True)
class Response:
    """Response to an HTTP request."""

    status: int
    body: str
    etag: str = field(default="", compare=False)


def request(method: str, url: str, headers: Mapping[str, str]) -> Response:
    """Make a request without a proxy, because the server is local to the host.

    Raises :class:`OSError` without a response in time.
    """
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
    """Client for IMDSv2, the only version that can't be disabled."""

    def __init__(self, url: str = AWS_URL) -> None:
        self._url = url.rstrip("/")
        self._token = ""

    def get(self, path: str) -> Response:
        """Get a path. Raises :class:`OSError` without a response in time."""
        response = self._get(path)
        if response.status == HTTPStatus.UNAUTHORIZED:
            # There is no token yet, or it has expired.
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_TTL_SECONDS)}
            token = request("PUT", f"{self._url}/latest/api/token", headers)
            if token.status != HTTPStatus.OK:
                raise ConnectionError(f"no session token: status {token.status}")
            self._token = token.body
            response = self._get(path)
        return response

    def _get(self, path: str) -> Response:
        return request("GET", self._url + path, {"X-aws-ec2-metadata-token": self._token})


def gcp_value(path: str, url: str = GCP_URL) -> Response:
    """Get a value from Google's server. Raises :class:`OSError` without a response in time."""
    return request("GET", f"{url.rstrip('/')}/computeMetadata/v1/instance/{path}", GCP_HEADERS)


def identity(kind: str, url: str | None) -> str:
    """Return the id of this machine at its provider. ``kind`` is ``aws`` or ``gcp``.

    Raises :class:`~vcasgd.errors.CloudUnavailable` without a valid response.
    """
    try:
        if kind == "gcp":
            response = gcp_value("name", url or GCP_URL)
        else:
            response = AwsMetadata(url or AWS_URL).get("/latest/meta-data/instance-id")
    except OSError as error:
        raise CloudUnavailable(f"the metadata server does not respond: {error}") from error
    if response.status != 200 or not response.body.strip():
        raise CloudUnavailable(f"the metadata server returned no id: status {response.status}")
    return response.body.strip()


def gcp_secret(name: str, metadata_url: str | None, url: str = SECRET_MANAGER_URL) -> str:
    """Return a value from Google's Secret Manager, with the machine's service account.

    ``name`` is ``projects/<project>/secrets/<name>``. Raises :class:`CloudUnavailable` and
    :class:`CloudDenied`.
    """
    path = "service-accounts/default/token"
    try:
        response = gcp_value(path, metadata_url or GCP_URL)
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

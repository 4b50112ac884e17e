"""Secrets that a machine fetches itself, so that they need not be in its user data."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request

from vcasgd.errors import CloudDenied, CloudUnavailable
from vcasgd.fleet.machine.metadata import GCP_URL, TIMEOUT_SECONDS, Http, gcp_value, request

SECRET_MANAGER_URL = "https://secretmanager.googleapis.com"


def aws_secret(name: str, region: str) -> str:
    """A value of Secrets Manager. Raises :class:`~vcasgd.errors.FleetError`."""
    from vcasgd.fleet.providers.aws.provider import (
        secret,  # needs boto3, which only such machines have
    )

    return secret(name, region)


def gcp_secret(
    name: str, metadata_url: str | None, url: str = SECRET_MANAGER_URL, http: Http = request
) -> str:
    """A value of Secret Manager, with the rights of the machine's own service account.

    ``name`` is ``projects/<project>/secrets/<name>``. Raises :class:`CloudUnavailable` and
    :class:`CloudDenied`.
    """
    path = "service-accounts/default/token"
    try:
        granted = gcp_value(path, metadata_url or GCP_URL, http)
        token = json.loads(granted.body)["access_token"]
        asked = urllib.request.Request(
            f"{url}/v1/{name}/versions/latest:access", headers={"Authorization": f"Bearer {token}"}
        )
        with urllib.request.urlopen(asked, timeout=TIMEOUT_SECONDS) as answer:
            payload = json.load(answer)["payload"]["data"]
    except urllib.error.HTTPError as error:
        with error:
            kind = CloudUnavailable if error.code >= 500 else CloudDenied
            raise kind(f"secret {name}: status {error.code}") from error
    except (OSError, ValueError, LookupError) as error:
        raise CloudUnavailable(f"secret {name}: {type(error).__name__}") from error
    return base64.b64decode(payload).decode()

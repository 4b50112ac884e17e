"""Client for secrets that a machine fetches itself, so that they aren't in its user data."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request

from vcasgd.errors import CloudDenied, CloudUnavailable
from vcasgd.fleet.machine.metadata import GCP_URL, TIMEOUT_SECONDS, Http, gcp_value, request

#: Address of Google's Secret Manager.
SECRET_MANAGER_URL = "https://secretmanager.googleapis.com"


def aws_secret(name: str, region: str) -> str:
    """Return a value from AWS Secrets Manager. Raises :class:`~vcasgd.errors.FleetError`."""
    # Imported here: it needs boto3, which only machines in AWS have.
    from vcasgd.fleet.providers.aws.provider import secret

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

"""Reports of failed boots, from the real scripts to the controller's view."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import parse_qs

from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from support.machine_roots import KEYS, metadata_of, recording_ec2, run_failing_boot, write_root

SAID = "worker: step add_user failed (status 1)"


def test_failed_step_is_reported_to_ec2_without_any_tool(tmp_path: Path) -> None:
    write_root(tmp_path, "CLOUD=aws\nROLE=worker\nCLUSTER=mine\n")
    with metadata_of("i-0123") as metadata, recording_ec2() as (url, asked):
        where = {"VCASGD_METADATA_URL": metadata, "AWS_ENDPOINT_URL": url}
        done = run_failing_boot(tmp_path, where)

    assert done.returncode == 1
    assert SAID in (tmp_path / "dev/console").read_text()
    ((headers, body),) = asked
    assert {name: values[0] for name, values in parse_qs(body).items()} == {
        "Action": "CreateTags",
        "Version": "2016-11-15",
        "ResourceId.1": "i-0123",
        "Tag.1.Key": "vcasgd:boot-error",
        "Tag.1.Value": SAID,
    }
    assert headers["X-Amz-Security-Token"] == KEYS["Token"]
    assert _signature(url, headers, body) in headers["Authorization"]


def _signature(url: str, headers: dict[str, str], body: str) -> str:
    """Compute a request's signature, as AWS does."""
    signed_headers = re.search(r"SignedHeaders=([^,]*)", headers["Authorization"])
    assert signed_headers is not None
    lower = {name.lower(): value for name, value in headers.items()}
    assert "x-amz-security-token" in signed_headers[1]
    signed = {name: lower[name] for name in signed_headers[1].split(";")}
    request = AWSRequest("POST", f"{url}/", data=body, headers=signed)
    request.context["timestamp"] = lower["x-amz-date"]
    credentials = Credentials(KEYS["AccessKeyId"], KEYS["SecretAccessKey"])
    auth = SigV4Auth(credentials, "ec2", "us-east-1")
    return str(
        auth.signature(auth.string_to_sign(request, auth.canonical_request(request)), request)
    )

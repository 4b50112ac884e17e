"""Submission of jobs with secrets, whose values no response contains."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from support.api_harness import Api, spec, zipped
from support.secret_search import in_files

from vcasgd.client import Client
from vcasgd.encryption import StorageCipher
from vcasgd.errors import SpecError
from vcasgd.store.keys import LedgerKeys

VALUE = "hf_a-secret-value-of-some-length"
SOURCES: dict[str, Any] = {"secrets": {"HF_TOKEN": {"env": "MY_TOKEN"}}}


def test_values_are_stored_encrypted_and_shown_nowhere(
    own_api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", VALUE)
    with own_api.client() as client:
        job = client.submit(spec(**SOURCES), zipped())
        text = client.job(job.id).file()
    stored = own_api.connection.get(LedgerKeys(job.id).secrets)

    cipher = StorageCipher(own_api.token * 2)
    assert cipher.decrypt(stored.decode(), job.id) == f'{{"HF_TOKEN": "{VALUE}"}}'
    assert job.spec.secrets["HF_TOKEN"].env == "MY_TOKEN"
    assert VALUE not in repr(job) + text
    assert in_files(own_api.home, stored.decode()), "the ledger was written"
    assert in_files(own_api.home, VALUE) == []


@pytest.mark.parametrize(
    ("secrets", "field", "problem"),
    [
        ({}, "secrets.HF_TOKEN", "the request has no value for it"),
        ({"HF_TOKEN": VALUE, VALUE: "x"}, "secrets", "1 values are for secrets"),
        ({"HF_TOKEN": [VALUE]}, "secrets.HF_TOKEN", "must be text"),
        ({"HF_TOKEN": VALUE * 2000}, "secrets.HF_TOKEN", "at most"),
        ({"HF_TOKEN": ""}, "secrets.HF_TOKEN", "at least 1"),
    ],
)
def test_an_invalid_request_is_refused_without_its_values(
    http: httpx.Client, client: Client, secrets: Any, field: str, problem: str
) -> None:
    body = {
        "spec": spec(**SOURCES).model_dump(mode="json"),
        "package": client.upload(zipped()),
        "secrets": secrets,
    }

    answer = http.post("jobs", json=body)

    assert answer.status_code == 422
    assert answer.json()["field"] == field
    assert problem in answer.json()["detail"]
    assert VALUE not in answer.text


def test_a_cluster_without_a_key_refuses_secrets(own_api: Api) -> None:
    own_api.end()
    own_api.start(VCASGD_SECRETS_KEY="")
    with own_api.client() as client, pytest.raises(SpecError, match="no key to encrypt"):
        client.submit(spec(**SOURCES), zipped(), secrets={"HF_TOKEN": VALUE})

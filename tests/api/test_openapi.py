"""The OpenAPI document, and responses to requests generated from it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings, strategies
from schemathesis import Case
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    ignored_auth,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)
from support.api_harness import Api
from support.waiting import PATIENCE

from vcasgd.api.app import create_app
from vcasgd.settings import Settings
from vcasgd.storage.objects import Storage
from vcasgd.store.connection import connect

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    unsupported_method,
    ignored_auth,
]
EXAMPLES = 8
#: Operations below /api/v1 that need no token.
OPEN = ("sign_in", "list_volunteers")


def described() -> dict[str, Any]:
    """Return the document without a server."""
    storage = Storage(Path(tempfile.gettempdir()).as_uri())
    app = create_app(Settings(token="x"), connect("redis://127.0.0.1:1/0"), storage)
    return app.openapi()


@schemathesis.serializer("application/zip")
def as_it_is(_: Any, value: Any) -> bytes:
    return value if isinstance(value, bytes) else bytes(value)


schemathesis.openapi.media_type("application/zip", strategies.binary(max_size=100))
# the platform's stream has no end; test_api_stream.py tests it
schema = schemathesis.openapi.from_dict(described()).exclude(operation_id="follow_everything")


@pytest.fixture
def document(api: Api) -> dict[str, Any]:
    """Return the document that the API serves."""
    answer = httpx.get(f"{api.url}/api/v1/openapi.json", trust_env=False, timeout=PATIENCE)
    document: dict[str, Any] = answer.json()
    return document


@schema.parametrize()
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_generated_requests_get_documented_responses(api: Api, case: Case) -> None:
    headers = {"Authorization": f"Bearer {api.token}"}
    case.call_and_validate(base_url=api.url, headers=headers, checks=CHECKS, timeout=PATIENCE)


def test_every_operation_has_a_readable_name(document: dict[str, Any]) -> None:
    names = [
        operation["operationId"]
        for methods in document["paths"].values()
        for operation in methods.values()
    ]

    assert len(set(names)) == len(names)
    assert {"submit_job", "list_events", "get_model", "evict_worker", "head_package"} <= set(names)


def test_every_operation_requires_the_token(document: dict[str, Any]) -> None:
    for path, methods in document["paths"].items():
        for operation in methods.values():
            guarded = path.startswith("/api/v1") and operation["operationId"] not in OPEN
            assert bool(operation.get("security")) == guarded, path
            if path.startswith("/api/v1") and "/public/" not in path:
                assert "application/problem+json" in operation["responses"]["401"]["content"]
    assert document["components"]["securitySchemes"]["token"]["scheme"] == "bearer"


def test_no_page_loads_scripts_from_elsewhere(api: Api) -> None:
    for path in ("/docs", "/redoc", "/api/v1/docs"):
        answer = httpx.get(
            api.url + path,
            headers={"Authorization": f"Bearer {api.token}"},
            trust_env=False,
            timeout=PATIENCE,
        )
        # if the dashboard is built, its page answers unknown paths
        policy = answer.headers.get("Content-Security-Policy", "")
        assert answer.status_code == 404 or "script-src 'self'" in policy

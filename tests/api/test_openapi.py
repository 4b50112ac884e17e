"""The OpenAPI document, and responses to requests generated from it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies
from support.api_harness import Api
from support.waiting import PATIENCE

EXAMPLES = 8
#: The platform's stream has no end. test_api_stream.py tests it.
ENDLESS = "follow_everything"
#: Operations below /api/v1 that need no token.
OPEN = ("sign_in",)


@pytest.fixture
def document(api: Api) -> dict[str, Any]:
    with api.visitor() as http:
        return http.get("openapi.json").json()


def test_the_document_is_the_same_with_and_without_compression(
    api: Api, document: dict[str, Any]
) -> None:
    with api.visitor() as http:
        plain, packed = (
            http.get("openapi.json", headers={"Accept-Encoding": encoding})
            for encoding in ("identity", "gzip")
        )

        assert plain.json() == packed.json() == document
        assert "content-encoding" not in plain.headers
        assert packed.num_bytes_downloaded < len(plain.content) / 4
        assert http.head("openapi.json").status_code == 200


@pytest.mark.ci
def test_generated_requests_get_documented_responses(
    api: Api, document: dict[str, Any], subtests: pytest.Subtests
) -> None:
    # Imported here because it takes seconds, and each process of the tests imports this module.
    import schemathesis
    from schemathesis import checks
    from schemathesis.generation import GenerationMode
    from schemathesis.specs.openapi import checks as openapi

    documented = [
        checks.not_a_server_error,
        openapi.status_code_conformance,
        openapi.content_type_conformance,
        openapi.response_headers_conformance,
        openapi.response_schema_conformance,
        openapi.unsupported_method,
        openapi.ignored_auth,
    ]
    schemathesis.serializer("application/zip")(lambda _, value: bytes(value))
    schemathesis.openapi.media_type("application/zip", strategies.binary(max_size=100))
    schema = schemathesis.openapi.from_dict(document).exclude(operation_id=ENDLESS)
    headers = {"Authorization": f"Bearer {api.token}"}
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) > 40
    for operation in operations:

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(strategies.one_of(operation.as_strategy(generation_mode=m) for m in GenerationMode))
        def answers(case: schemathesis.Case) -> None:
            case.call_and_validate(
                base_url=api.url, headers=headers, checks=documented, timeout=PATIENCE
            )

        with subtests.test(operation.label):
            answers()


def test_every_operation_has_a_readable_name(document: dict[str, Any]) -> None:
    names = [
        operation["operationId"]
        for methods in document["paths"].values()
        for operation in methods.values()
    ]

    assert len(set(names)) == len(names)
    assert {"submit_job", "list_events", "get_model", "evict_worker", "head_package"} <= set(names)

"""Authentication of requests, and secrecy of the token."""

from __future__ import annotations

import httpx
import pytest
from support.api_harness import Api

from vcasgd.client import Client
from vcasgd.errors import Unauthorized

PUBLIC = {"/healthz", "/readyz", "/api/v1/openapi.json"}
#: The operation that receives the token.
OPEN = ("post", "/api/v1/session")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Basic dXNlcjpwYXNz"},
        {"Authorization": b"Bearer \xff\xfe"},
    ],
)
def test_requests_without_the_token_are_refused(api: Api, headers: dict[str, str | bytes]) -> None:
    with httpx.Client(base_url=api.url, headers=headers, trust_env=False) as http:
        document = http.get("/api/v1/openapi.json").json()
        operations = [
            (method, path)
            for path, methods in document["paths"].items()
            for method in methods
            if path not in PUBLIC and (method, path) != OPEN
        ]
        assert len(operations) > 20
        for method, path in [*operations, ("get", "/api/v1/nothing"), ("get", "/api/v2/jobs")]:
            answer = http.request(method, path, content=b"{")
            assert answer.status_code == 401, (method, path)
            assert answer.headers["WWW-Authenticate"] == "Bearer"
            assert answer.headers["Content-Type"] == "application/problem+json"


def test_token_never_appears_in_logs_or_responses(api: Api, client: Client) -> None:
    client.jobs()
    with Client(api.url, "wr0ng-token") as stranger, pytest.raises(Unauthorized) as caught:
        stranger.jobs()

    log = api.log.read_text()
    for text in (repr(client), repr(vars(client)), log, str(caught.value)):
        assert api.token not in text
        assert "wr0ng-token" not in text
    assert api.ledger.files.password not in log


def test_unknown_route_returns_a_problem(http: httpx.Client) -> None:
    answer = http.get("nothing")

    assert answer.status_code == 404
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert answer.json()["detail"] == "there is nothing at /api/v1/nothing"


def test_wrong_method_returns_a_problem(http: httpx.Client) -> None:
    answer = http.delete("jobs")

    assert (answer.status_code, answer.json()["title"]) == (405, "Method Not Allowed")
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert answer.headers["Allow"]


@pytest.mark.parametrize("path", ["healthz", "metrics", "api/v1/jobs", "api/v1/openapi.json", "x"])
def test_no_browser_guesses_the_type_of_a_response(api: Api, path: str) -> None:
    answer = httpx.get(f"{api.url}/{path}", trust_env=False)

    assert answer.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8700", 200),
        ("127.0.0.1", 200),
        ("[::1]:8700", 200),
        ("rebound.example:8700", 401),
        ("localhost.example", 401),
        ("192.0.2.1", 401),
        ("[", 401),
        ("", 401),
    ],
)
def test_a_page_whose_name_resolves_to_this_machine_reads_no_metrics(
    api: Api, host: str, status: int
) -> None:
    answer = httpx.get(f"{api.url}/metrics", headers={"Host": host}, trust_env=False)

    assert answer.status_code == status

"""Limits for the bodies of requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest
from support.api_harness import Api

from vcasgd.api.bodies import LONGEST_BODY, LONGEST_PUBLIC_BODY
from vcasgd.schemas.jobs import LONGEST_YAML

#: A body that no process has room for several times.
HUGE = 150_000_000
PIECE = bytes(1_000_000)
JSON = {"Content-Type": "application/json"}


def pieces(size: int) -> Iterator[bytes]:
    yield from (PIECE for _ in range(size // len(PIECE)))


def operations(http: httpx.Client) -> list[tuple[str, str]]:
    """Return method and path of all operations that have a body, with names in the path."""
    paths = http.get("openapi.json").json()["paths"]
    found = [
        (method, path, operation)
        for path, methods in paths.items()
        for method, operation in methods.items()
        if "requestBody" in operation
    ]
    assert [path for _, path, each in found if "413" not in each["responses"]] == []
    names = {"job": "x-abc234", "digest": "0" * 64, "worker": "w-1", "instance": "i-1",
             "machine": "join-x"}  # fmt: skip
    return [(method, path.format_map(names)) for method, path, _ in found]


@pytest.mark.parametrize("declared", [True, False], ids=["with length", "chunked"])
def test_huge_body_without_a_token_is_refused_and_not_kept(own_api: Api, declared: bool) -> None:
    with own_api.client() as client:
        client.jobs()
    before = own_api.process.resident_bytes()

    # the API may close the connection before all is sent, which a client can't tell from an error
    with httpx.Client(base_url=own_api.url, headers=JSON, trust_env=False) as stranger:
        for _ in range(2):
            with suppress(httpx.TransportError):
                content = bytes(HUGE) if declared else pieces(HUGE)
                answer = stranger.post("/api/v1/session", content=content)
                assert answer.status_code == 413

    assert own_api.process.peak_bytes() - before < HUGE / 5


@pytest.mark.parametrize("declared", [True, False], ids=["with length", "chunked"])
def test_every_route_limits_its_body(api: Api, http: httpx.Client, declared: bool) -> None:
    found = operations(http)
    assert len(found) > 5

    for method, path in found:
        content = bytes(3 * LONGEST_BODY) if declared else pieces(3 * LONGEST_BODY)
        answer = http.request(method, f"{api.url}{path}", content=content, headers=JSON)
        assert answer.status_code == 413, (method, path)
        assert answer.headers["Content-Type"] == "application/problem+json"


def test_a_refused_body_names_the_limit(api: Api) -> None:
    with httpx.Client(base_url=api.url, headers=JSON, trust_env=False) as stranger:
        answer = stranger.post("/api/v1/session", content=b" " * (LONGEST_PUBLIC_BODY + 1))
    assert answer.json()["detail"] == "the body is longer than 16 kB"


def test_the_longest_job_file_fits(http: httpx.Client) -> None:
    text = "# " + "\N{SNOWMAN}" * (LONGEST_YAML - 2)

    answer = http.post("jobs/validate", json={"yaml": text})

    assert answer.status_code == 200

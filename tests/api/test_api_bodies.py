"""Limits for the bodies of requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest
from support.api_harness import Api, filled, operations

from vcasgd.limits import (
    MAX_BODY_BYTES,
    MAX_DIGITS,
    MAX_PUBLIC_BODY_BYTES,
    MAX_TEXT,
    MAX_VALUES,
)

#: A body that no process has room for several times.
HUGE = 80_000_000
PIECE = bytes(1_000_000)
JSON = {"Content-Type": "application/json"}


def pieces(size: int) -> Iterator[bytes]:
    yield from (PIECE for _ in range(size // len(PIECE)))


@pytest.mark.parametrize("declared", [True, False], ids=["with length", "chunked"])
def test_huge_body_without_a_token_is_refused_and_not_kept(own_api: Api, declared: bool) -> None:
    with own_api.client() as client:
        client.jobs()
    before = own_api.process.resident_bytes()

    # the API may close the connection before all is sent, which a client can't tell from an error
    with own_api.visitor(JSON) as stranger:
        for _ in range(2):
            with suppress(httpx.TransportError):
                content = bytes(HUGE) if declared else pieces(HUGE)
                answer = stranger.post("sign-in", content=content)
                assert answer.status_code == 413

    assert own_api.process.peak_bytes() - before < HUGE / 5


@pytest.mark.parametrize("declared", [True, False], ids=["with length", "chunked"])
def test_every_route_limits_its_body(api: Api, http: httpx.Client, declared: bool) -> None:
    found = [each for each in operations(http) if "requestBody" in each[2]]
    assert len(found) > 5

    for method, path, operation in found:
        content = bytes(3 * MAX_BODY_BYTES) if declared else pieces(3 * MAX_BODY_BYTES)
        url = f"{api.url}{filled(path)}"
        answer = http.request(method, url, content=content, headers=JSON)
        assert answer.status_code == 413, (method, path)
        assert "413" in operation["responses"], (method, path)
        assert answer.headers["Content-Type"] == "application/problem+json"


def test_a_refused_body_names_the_limit(api: Api) -> None:
    with api.visitor(JSON) as stranger:
        answer = stranger.post("sign-in", content=b" " * (MAX_PUBLIC_BODY_BYTES + 1))
    assert answer.json()["detail"] == "the body is longer than 16 kB"


def test_the_longest_job_file_fits(http: httpx.Client) -> None:
    text = "# " + "\N{SNOWMAN}" * (MAX_TEXT - 2)

    answer = http.post("jobs/validate", json={"yaml": text})

    assert answer.status_code == 200


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


#: Values that are short, and cost more than their length in a parser, a number, or an encoder.
HOSTILE_JSON = {
    "depth of 230": nested(230),
    "depth of 100,000": nested(100_000),
    "many values": "[" + "0," * MAX_VALUES + "0]",
    "many digits": "9" * (MAX_DIGITS + 1),
    "more digits": "9" * 100_000,
    "long text": '"' + "a" * (MAX_TEXT + 1) + '"',
    "half of a pair": r'"\ud800"',
}
#: tests/unit/test_yaml.py has all kinds.
HOSTILE_YAML = {
    "aliases": "a0: &a0 [1]\n"
    + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 30)),
    "hexadecimal": "name: x\ntask: a:B\nepochs: 0x" + "f" * 6000,
}


@pytest.mark.parametrize("path", ["jobs", "plan", "tokens", "sign-in", "jobs/validate"])
@pytest.mark.parametrize("value", HOSTILE_JSON.values(), ids=HOSTILE_JSON)
def test_a_body_that_costs_more_than_its_length_is_refused(
    http: httpx.Client, path: str, value: str
) -> None:
    spec = '{"name": "x", "task": "a:B", "epochs": 1, "args": {"x": ' + value + "}}"
    body = f'{{"spec": {spec}, "package": "{"0" * 64}"}}'

    answer = http.post(path, content=body, headers=JSON)

    assert answer.status_code in (413, 422), answer.text
    assert len(answer.content) < 2000
    assert http.get("jobs").json() == []


@pytest.mark.parametrize("text", HOSTILE_YAML.values(), ids=HOSTILE_YAML)
def test_a_job_file_that_costs_more_than_its_length_is_refused(
    api: Api, http: httpx.Client, text: str
) -> None:
    reader = api.http(http.post("tokens", json={"name": "reader", "scope": "read"}).json()["token"])
    with reader:
        answer = reader.post("jobs/validate", json={"yaml": text})

    assert answer.status_code == 200
    assert [each["message"][:11] for each in answer.json()["errors"]] == ["is refused:"]

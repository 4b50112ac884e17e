"""The page for volunteers: what everyone may see of a cluster, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.api_harness import Api
from support.volunteers import public_api, work_of_volunteers
from support.waiting import PATIENCE

from vcasgd.api import public
from vcasgd.errors import SpecError
from vcasgd.schemas.public import PublicJobView
from vcasgd.spec.job import JobSpec
from vcasgd.store.ledger.contributors import Contributors

PAGE = "api/v1/public/volunteers"
PUBLIC = {"title": "Digits for everyone", "description": "A small network reads digits."}


@pytest.fixture(scope="module")
def open_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with public_api(tmp_path_factory.mktemp("public")) as api:
        yield api


@pytest.fixture
def visitor(open_api: Api) -> Iterator[httpx.Client]:
    """Somebody without a token."""
    with httpx.Client(base_url=open_api.url, trust_env=False, timeout=PATIENCE) as http:
        yield http


def test_without_the_setting_there_is_no_page(api: Api) -> None:
    api.submit(public=PUBLIC)

    answer = httpx.get(f"{api.url}/{PAGE}", trust_env=False, timeout=PATIENCE)

    assert answer.status_code == 404
    assert answer.json()["detail"] == "this cluster has no public page for volunteers"
    assert answer.json()["remedy"] == "its administrator can set VCASGD_PUBLIC_PAGE=true"
    assert "Digits" not in answer.text


def test_visitors_see_public_jobs_and_nicknames_and_nothing_else(
    open_api: Api, visitor: httpx.Client
) -> None:
    # Given a job that is public and one that is not, with the same volunteers
    open_api.connection.flushall()
    shown = open_api.submit(name="inside-name", public=PUBLIC)
    hidden = open_api.submit(name="hidden-name")
    for job in (shown, hidden):
        work_of_volunteers(open_api, job)
    lease = open_api.lease(shown)
    result = {"version": 5, "metrics": {"accuracy": 0.75, "secret-metric": 1.0}, "worker": "w-1"}
    assert open_api.leases(shown).report_evaluation(lease, {**result, "seconds": 1.0, "at": 9.0})

    # When somebody without a token looks
    answer = visitor.get(PAGE)

    # Then they see the public one, how far it is, and who helps
    (job,) = answer.json()["jobs"]
    assert (job["title"], job["description"]) == tuple(PUBLIC.values())
    assert (job["state"], job["progress"], job["machines"]) == ("running", 0.5, 4)
    assert (job["samples"], job["total_samples"], job["own_samples"]) == (100, 200, 20)
    assert job["evaluation"]["metric"] == "accuracy"
    assert job["evaluation"]["value"] == 0.75
    assert job["contributions"] == [
        {"nickname": "Night Owl", "samples": 40, "share": 0.4},
        {"nickname": "Bob", "samples": 30, "share": 0.3},
        {"nickname": None, "samples": 10, "share": 0.1},
    ]

    # and no name of a job, token, machine, or host, and no metric that a worker made up
    contributors = Contributors(open_api.connection)
    secrets = ["inside-name", "hidden-name", "t-ann", "t-eve", "join-", "secret", "w-1", shown]
    secrets += [str(contributors.of_worker(shown, f"{shown}.join-t-ann-1")), open_api.token]
    assert [each for each in secrets if each in answer.text] == []
    assert set(job) == PublicJobView.model_fields.keys()
    assert answer.headers["cache-control"] == f"public, max-age={public.FRESH_SECONDS:g}"


def test_many_visitors_cost_the_ledger_no_more_than_one(
    open_api: Api, visitor: httpx.Client
) -> None:
    visitor.get(PAGE)
    before = open_api.connection.info("commandstats")
    for _ in range(50):
        assert visitor.get(PAGE).status_code == 200
    after = open_api.connection.info("commandstats")

    read = after["cmdstat_zrevrange"]["calls"] - before["cmdstat_zrevrange"]["calls"]
    assert read <= 2


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_visitors_change_nothing(visitor: httpx.Client, method: str) -> None:
    assert visitor.request(method, PAGE).status_code == 401
    assert visitor.get("api/v1/public/other").status_code == 401
    assert visitor.get("api/v1/jobs").status_code == 401


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({}, "public.title"),
        ({"title": " "}, "public.title"),
        ({"title": "x" * 101}, "public.title"),
        ({"title": "two\nlines"}, "public.title"),
        ({"title": "\u202edesrever"}, "public.title"),
        ({"title": "x", "description": "\x1b[31m"}, "public.description"),
        ({"title": "x", "link": "https://x"}, "public.link"),
        (True, "public"),
    ],
)
def test_a_title_is_one_line_of_text(value: Any, field: str) -> None:
    with pytest.raises(SpecError) as caught:
        JobSpec.parse({"name": "x", "task": "t:T", "epochs": 1, "public": value})
    assert caught.value.details["field"] == field

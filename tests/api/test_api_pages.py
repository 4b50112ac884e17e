"""The dashboard's files, its page, and security headers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.api_harness import serving

from vcasgd.api.pages import HEADERS

SCRIPT = "console.log(1);" * 1000


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    static = tmp_path_factory.mktemp("static")
    (static / "assets").mkdir()
    (static / "index.html").write_text("<!doctype html><title>vcasgd</title>")
    (static / "favicon.svg").write_text("<svg/>")
    (static / "assets" / "index-1a2b.js").write_text(SCRIPT)
    (static.parent / "secret.txt").write_text("secret")
    return static


@pytest.fixture(scope="module")
def pages(built: Path) -> Iterator[httpx.Client]:
    with serving(built) as http:
        yield http


@pytest.mark.parametrize("path", ["/", "/jobs", "/jobs/digits-abc234", "/sign-in?next=/fleet"])
def test_every_address_shows_the_page(pages: httpx.Client, path: str) -> None:
    answer = pages.get(path)

    assert (answer.status_code, "<title>vcasgd" in answer.text) == (200, True)
    assert answer.headers["Cache-Control"] == "no-cache"
    assert {name: answer.headers[name] for name in HEADERS} == HEADERS


def test_files_with_a_digest_in_their_name_are_cached(pages: httpx.Client) -> None:
    script = pages.get("/assets/index-1a2b.js")

    assert script.text == SCRIPT
    assert script.headers["Content-Encoding"] == "gzip"
    assert "immutable" in script.headers["Cache-Control"]
    assert script.headers["Content-Type"].startswith("text/javascript")
    assert pages.get("/favicon.svg").headers["Cache-Control"] == "no-cache"


@pytest.mark.parametrize(
    "path",
    ["/assets/none.js", "/../secret.txt", "/%2e%2e/secret.txt", "/assets/..%2f..%2fsecret.txt"],
)
def test_other_files_are_not_found(pages: httpx.Client, path: str) -> None:
    answer = pages.get(path)

    assert answer.status_code == 404
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_pages_are_read_only(pages: httpx.Client) -> None:
    assert pages.post("/").status_code == 405
    assert pages.head("/").status_code == 200


def test_the_api_is_described_without_scripts_and_other_files(pages: httpx.Client) -> None:
    answer = pages.get("/api/docs")

    assert answer.status_code == 200
    assert answer.headers["Content-Security-Policy"] == HEADERS["Content-Security-Policy"]
    loaded = r"<(script|link|img|iframe)|(src|href)=.https?:|@import|url\("
    assert not re.search(loaded, answer.text)
    assert "with scope admin" in answer.text
    document = pages.get("/api/v1/openapi.json").json()
    for path in document["paths"]:
        assert f"<code>{path}</code>" in answer.text
    targets = set(re.findall(r'href="#([^"]+)"', answer.text))
    assert targets <= set(re.findall(r'id="([^"]+)"', answer.text))
    assert {f"schema-{name}" for name in ("JobView", "Problem")} <= targets


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
def test_usual_addresses_lead_to_the_description(pages: httpx.Client, path: str) -> None:
    answer = pages.get(path)
    assert (answer.status_code, answer.headers["Location"]) == (307, "/api/docs")


def test_page_explains_how_to_build_the_dashboard(tmp_path: Path) -> None:
    with serving(tmp_path / "none") as pages:
        answer = pages.get("/")

        assert (answer.status_code, "make dashboard" in answer.text) == (200, True)
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert pages.get("/jobs").status_code == 404
        # A build appears without a restart.
        (tmp_path / "none" / "index.html").write_text("built")
        assert pages.get("/jobs").text == "built"

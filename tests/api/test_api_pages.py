"""The dashboard's files, its page, and security headers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn
from support.ports import free_port
from support.waiting import await_truth

from vcasgd.api.app import create_app
from vcasgd.api.pages import HEADERS
from vcasgd.settings import Settings
from vcasgd.storage.objects import Storage
from vcasgd.store.connection import connect

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


@contextmanager
def serving(static: Path) -> Iterator[httpx.Client]:
    storage = Storage(static.as_uri())
    settings = Settings(token="x" * 16)
    app = create_app(settings, connect("redis://127.0.0.1:1/0"), storage, static)
    port = free_port()
    config = uvicorn.Config(app, port=port, log_config=None, lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        await_truth(lambda: server.started)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http:
            yield http
    finally:
        server.should_exit = True
        thread.join(10)


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


def test_page_explains_how_to_build_the_dashboard(tmp_path: Path) -> None:
    with serving(tmp_path / "none") as pages:
        answer = pages.get("/")

        assert (answer.status_code, "make dashboard" in answer.text) == (200, True)
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert pages.get("/jobs").status_code == 404
        # A build appears without a restart.
        (tmp_path / "none" / "index.html").write_text("built")
        assert pages.get("/jobs").text == "built"

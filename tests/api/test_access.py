"""Decisions about access: what each scope includes, and the scope of every route."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from fastapi.routing import APIRoute, iter_route_contexts
from pydantic import SecretStr, TypeAdapter, ValidationError

from vcasgd.api.access import scope_of
from vcasgd.api.app import create_app
from vcasgd.settings import Settings
from vcasgd.spec.access import Scope, TokenName
from vcasgd.storage.objects import Storage
from vcasgd.store.connection import connect
from vcasgd.store.ledger.api_tokens import name_in

#: Routes without a scope: they need no token, or, for metrics, any.
OPEN = {
    ("GET", "/api/v1/openapi.json"),
    ("HEAD", "/api/v1/openapi.json"),
    *((method, path) for method in ("GET", "HEAD") for path in ("/api/docs", "/docs", "/redoc")),
    ("GET", "/wheel"),
    ("GET", "/wheel/{name}"),
    ("GET", "/healthz"),
    ("GET", "/readyz"),
    ("GET", "/metrics"),
    ("POST", "/api/v1/sign-in"),
}
#: Routes that are not GET and need only scope read, because they change nothing on the platform.
HARMLESS = {
    ("HEAD", "/packages/{digest}"),
    ("POST", "/jobs/validate"),
    ("POST", "/plan"),
    ("DELETE", "/sign-in"),
}
JOIN_ONLY = {
    ("POST", "/join"),
    ("POST", "/machines/{machine}/report"),
    ("GET", "/machines/{machine}/packages/{digest}"),
    ("DELETE", "/machines/{machine}"),
}
ADMIN_ONLY = {
    ("POST", "/workers/{worker}/evict"),
    ("POST", "/jobs/{job}/exec"),
    ("POST", "/machines/{machine}/evict"),
    ("POST", "/tokens"),
    ("GET", "/tokens"),
    ("DELETE", "/tokens/{name}"),
}


def test_every_route_names_its_scope() -> None:
    storage = Storage(Path(tempfile.gettempdir()).as_uri())
    app = create_app(Settings(token=SecretStr("x" * 16)), connect("redis://127.0.0.1:1/0"), storage)
    scopes = {
        (method, str(each.path)): scope_of(each.original_route)
        if isinstance(each.original_route, APIRoute)
        else None
        for each in iter_route_contexts(app.routes)
        for method in each.methods or ()
    }

    assert len(scopes) > 40
    assert {route for route, scope in scopes.items() if scope is None} == OPEN
    guarded = {
        (method, path.removeprefix("/api/v1")): scope
        for (method, path), scope in scopes.items()
        if scope is not None
    }
    assert {each for each, scope in guarded.items() if scope is Scope.ADMIN} == ADMIN_ONLY
    assert {each for each, scope in guarded.items() if scope is Scope.JOIN} == JOIN_ONLY
    changing = {each for each, scope in guarded.items() if scope is Scope.READ and each[0] != "GET"}
    assert changing == HARMLESS


@pytest.mark.parametrize("name", ["ann", "a", "team-7", "a" * 40])
def test_a_token_has_a_name(name: str) -> None:
    assert TypeAdapter(TokenName).validate_python(name) == name
    assert name_in(f"vcasgd_{name}_{'0' * 64}") == name


@pytest.mark.parametrize(
    "name", ["a" * 41, "", "Ann", "-ann", "ann-", "ann_b", "ann\n", "\u00e4nn", "bootstrap"]
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(TokenName).validate_python(name)


@pytest.mark.parametrize(
    "text",
    ["", "vcasgd_ann_", f"vcasgd_ann_{'0' * 63}", f"vcasgd_ann_{'g' * 64}", f"ann_{'0' * 64}",
     f"vcasgd_ann_{'0' * 64}\n", f"vcasgd__{'0' * 64}", "x" * 100_000],
)  # fmt: skip
def test_text_of_another_form_is_no_token(text: str) -> None:
    assert name_in(text) is None

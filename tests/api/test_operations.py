"""Users of every operation of the API."""

from __future__ import annotations

import contextlib
import inspect
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
from pydantic import SecretStr
from support.api_harness import A_JOB, spec

from vcasgd.api.app import create_app
from vcasgd.client import Client
from vcasgd.errors import VcasgdError
from vcasgd.settings import Settings
from vcasgd.storage.objects import Storage
from vcasgd.store.connection import connect

ROOT = Path(__file__).parents[2]
#: Operations that neither the dashboard nor the client calls, and their users.
OTHERS = {
    "healthz": "process supervisors: whether the API runs",
    "readyz": "process supervisors: whether the API can serve requests",
    "join": "machines that join",
    "report_machine": "machines that have joined",
    "get_machine_package": "machines that have joined",
    "leave": "machines that have joined",
}


def test_every_operation_has_a_user(tmp_path: Path) -> None:
    """The client, which the command line uses, or the dashboard calls every operation."""
    operations = {
        (verb.upper(), path): operation["operationId"]
        for path, methods in _described()["paths"].items()
        for verb, operation in methods.items()
    }
    asked = _asked_by_pages() | _asked_by_the_sdk(operations, tmp_path)

    assert asked <= operations.keys()
    assert {operations[each] for each in operations.keys() - asked} == OTHERS.keys()


def _described() -> dict[str, Any]:
    """Return the document without a server."""
    storage = Storage(Path(tempfile.gettempdir()).as_uri())
    ledger = connect("redis://127.0.0.1:1/0")
    return create_app(Settings(token=SecretStr("x" * 16)), ledger, storage).openapi()


def _asked_by_pages() -> set[tuple[str, str]]:
    call = re.compile(r'api\.(GET|POST|PUT|DELETE)\(\s*"([^"]+)"')
    sources = (ROOT / "dashboard" / "src").rglob("*.ts*")
    return {found for path in sources for found in call.findall(path.read_text())}


def _asked_by_the_sdk(operations: Iterable[tuple[str, str]], folder: Path) -> set[tuple[str, str]]:
    """Return the requests of all client methods, each called once with generated arguments."""
    asked: set[tuple[str, str]] = set()
    patterns = {
        (verb, path): re.compile(re.sub(r"\{\w+\}", "[^/]+", path)) for verb, path in operations
    }

    def answer(request: httpx.Request) -> httpx.Response:
        asked.update(
            known
            for known, pattern in patterns.items()
            if known[0] == request.method and pattern.fullmatch(request.url.path)
        )
        if (request.method, request.url.path) == ("GET", "/api/v1/jobs/j"):
            return httpx.Response(200, json=A_JOB)
        return httpx.Response(404 if request.method == "HEAD" else 200, json={})

    given = {"job": "j", "spec": spec(), "package": b"", "path": folder, "folder": folder,
             "text": "", "patience": 0.0, "follow": True, "points": 10,
             "name": "n", "scope": "read"}  # fmt: skip
    client = Client("http://sdk", "token")
    with httpx.Client(
        base_url="http://sdk/api/v1/", transport=httpx.MockTransport(answer)
    ) as client._api._http:
        calls = [
            (method, {name: given[name] for name in inspect.signature(method).parameters
                      if name in given})
            for owner in (client, client.job("j"))
            for name in vars(type(owner))
            if name not in ("close", "evict", "bound") and not name.startswith("_")
            and inspect.ismethod(method := getattr(owner, name))
        ]  # fmt: skip
        calls += [(client.evict, {"worker": "w"}), (client.evict, {"machine": "i"})]
        calls.append((client.job("j").download, {"path": folder, "checkpoint": "c"}))
        for method, arguments in calls:
            # every response is an error; only the request matters
            with contextlib.suppress(VcasgdError, KeyError, TypeError, ValueError):
                found = method(**arguments)
                if isinstance(found, Iterator):
                    next(found, None)
    return asked

"""The dashboard, as it was built into the package: files, and one page for all its addresses."""

from __future__ import annotations

from collections.abc import MutableMapping
from http import HTTPStatus
from pathlib import Path, PurePosixPath
from typing import Any

from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import HTMLResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from vcasgd.api.problems import problem_response
from vcasgd.errors import ApiError, NotFound

#: what `make dashboard` builds
STATIC = Path(__file__).parent / "static"
#: files whose names change with what is in them
ASSETS = "assets"
FOR_EVER = "public, max-age=31536000, immutable"
#: smaller files gain nothing
GZIP_BYTES = 1000
#: nothing is loaded from anywhere else, and nothing runs that is not ours. Charts and the
#: components write styles into elements
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; font-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_NOT_BUILT = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>vcasgd</title>
<h1>The dashboard is not built</h1>
<p>Build it in the source folder, and reload this page:</p>
<pre>make dashboard</pre>
<p>The API works without it; it is described at
<a href="/api/v1/openapi.json">/api/v1/openapi.json</a>.</p>
</html>
"""


class Pages:
    """Answers what is not the API's. ``others``: beginnings of the paths that are."""

    def __init__(self, app: ASGIApp, *, static: Path, others: tuple[str, ...]) -> None:
        self._app = app
        self._others = others
        self._pages = GZipMiddleware(_Built(static), minimum_size=GZIP_BYTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(self._others):
            await self._app(scope, receive, send)
        else:
            await self._pages(scope, receive, send)


class _Built:
    """The files of a build, or a page that says that there is none."""

    def __init__(self, static: Path) -> None:
        self._index = static / "index.html"
        self._files = StaticFiles(directory=static, check_dir=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._response(scope)
        response.headers.update(HEADERS)
        await response(scope, receive, send)

    async def _response(self, scope: Scope) -> Response:
        path = PurePosixPath(scope["path"])
        if scope["method"] not in ("GET", "HEAD"):
            status = HTTPStatus.METHOD_NOT_ALLOWED
            return problem_response(ApiError("pages can only be read", status=status))
        # it may be built while we run
        if not self._index.is_file():
            return _not_built(path)
        # an address within the dashboard is that of its one page
        return await self._file(path if path.suffix else PurePosixPath("/index.html"), scope)

    async def _file(self, path: PurePosixPath, scope: MutableMapping[str, Any]) -> Response:
        try:
            response = await self._files.get_response(str(path).lstrip("/"), scope)
        except HTTPException:
            return _nothing(path)
        # a page that was kept would ask for files that a new build has no more
        lasting = path.parts[1:2] == (ASSETS,)
        response.headers["Cache-Control"] = FOR_EVER if lasting else "no-cache"
        return response


def _not_built(path: PurePosixPath) -> Response:
    if str(path) != "/":
        return _nothing(path)
    return HTMLResponse(_NOT_BUILT, headers={"Cache-Control": "no-store"})


def _nothing(path: PurePosixPath) -> Response:
    return problem_response(NotFound(f"there is nothing at {path}", status=404))

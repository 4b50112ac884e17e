"""The dashboard: its built files, and one page for all of its addresses."""

from __future__ import annotations

from collections.abc import MutableMapping
from http import HTTPStatus
from pathlib import Path, PurePosixPath
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from vcasgd.api.problems import problem_response
from vcasgd.errors import ApiError, NotFound

#: Folder of files whose names contain a hash of their content.
ASSETS = "assets"
IMMUTABLE = "public, max-age=31536000, immutable"
#: Content security policy: no content of other sites and no inline scripts. Inline styles are
#: allowed because the charts and the components set them.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; font-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
}
_NOT_BUILT = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>vcasgd</title>
<h1>The dashboard is not built</h1>
<p>Build it in the source folder, and then reload this page:</p>
<pre>make dashboard</pre>
<p>The API works without it. Its description is at
<a href="/api/docs">/api/docs</a>.</p>
</html>
"""


class Pages:
    """Middleware that serves the built dashboard, or a page that explains how to build it.

    Paths that start with one of ``others`` are left to the application.
    """

    def __init__(self, app: ASGIApp, *, static: Path, others: tuple[str, ...]) -> None:
        self._app = app
        self._others = others
        self._index = static / "index.html"
        self._files = StaticFiles(directory=static, check_dir=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(self._others):
            await self._app(scope, receive, send)
            return
        response = await self._response(scope)
        response.headers.update(HEADERS)
        await response(scope, receive, send)

    async def _response(self, scope: Scope) -> Response:
        path = PurePosixPath(scope["path"])
        if scope["method"] not in ("GET", "HEAD"):
            status = HTTPStatus.METHOD_NOT_ALLOWED
            return problem_response(ApiError("pages are read-only", status=status))
        # the dashboard may be built while this process runs
        if not self._index.is_file():
            return _not_built(path)
        # all addresses within the dashboard show its one page
        return await self._file(path if path.suffix else PurePosixPath("/index.html"), scope)

    async def _file(self, path: PurePosixPath, scope: MutableMapping[str, Any]) -> Response:
        try:
            response = await self._files.get_response(str(path).lstrip("/"), scope)
        except HTTPException:
            return _not_found(path)
        # a cached page would request files that a new build no longer has
        immutable = path.parts[1:2] == (ASSETS,)
        response.headers["Cache-Control"] = IMMUTABLE if immutable else "no-cache"
        return response


def _not_built(path: PurePosixPath) -> Response:
    if str(path) != "/":
        return _not_found(path)
    return HTMLResponse(_NOT_BUILT, headers={"Cache-Control": "no-store"})


def _not_found(path: PurePosixPath) -> Response:
    return problem_response(NotFound(f"there is nothing at {path}"))

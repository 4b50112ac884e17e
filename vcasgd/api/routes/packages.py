"""Packages: the users' code, by digest."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, Response, status
from fastapi.concurrency import run_in_threadpool

from vcasgd.api.problems import documented
from vcasgd.api.rows import Package
from vcasgd.api.services import Here, Services
from vcasgd.errors import ApiError, NotFound, PackageError
from vcasgd.task.package import check, digest_of

router = APIRouter(tags=["packages"])

DIGEST = r"^[0-9a-f]{64}$"
#: enough for the largest package over a slow line; then the connection is given up
UPLOAD_SECONDS = 600.0

Digest = Annotated[str, Path(pattern=DIGEST, description="SHA-256 of the zip, in hexadecimal")]

_ZIP: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/zip": {"schema": {"type": "string", "format": "binary"}}},
    }
}


def name_of(digest: str) -> str:
    return f"packages/{digest}.zip"


@router.put("/packages/{digest}", openapi_extra=_ZIP, responses=documented(408, 413))
async def put_package(here: Here, request: Request, digest: Digest) -> Package:
    """Stores a zip; storing it again changes nothing."""
    try:
        async with asyncio.timeout(UPLOAD_SECONDS):
            data = await _read(request, int(here.settings.package_limit_mb * 1e6))
    except TimeoutError as error:
        raise ApiError(f"no whole body within {UPLOAD_SECONDS:g} s", status=408) from error
    await run_in_threadpool(_store, here, digest, data)
    return Package(digest=digest, size=len(data))


async def _read(request: Request, limit: int) -> bytes:
    _check_size(int(request.headers.get("content-length", 0)), limit)
    data = bytearray()
    async for part in request.stream():
        data += part
        _check_size(len(data), limit)
    return bytes(data)


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        raise ApiError(
            f"the package is larger than {limit / 1e6:g} MB",
            remedy="list what is not code in .vcasgdignore, or raise VCASGD_PACKAGE_LIMIT_MB",
            status=status.HTTP_413_CONTENT_TOO_LARGE,
        )


def _store(here: Services, digest: str, data: bytes) -> None:
    if digest_of(data) != digest:
        raise PackageError("the package arrived damaged: its digest does not match", field="digest")
    check(data, int(here.settings.package_limit_mb * 1e6))
    if not here.storage.has(name_of(digest)):
        here.storage.put(name_of(digest), data)


@router.head("/packages/{digest}", response_class=Response, responses=documented(404))
def head_package(here: Here, digest: Digest) -> Response:
    """Whether a package is stored."""
    if not here.storage.has(name_of(digest)):
        raise NotFound(f"package {digest[:12]}… is not uploaded", status=404)
    return Response()

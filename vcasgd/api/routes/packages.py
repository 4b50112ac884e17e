"""Routes for packages: zips of users' code, named by their digest."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, Response, status
from fastapi.concurrency import run_in_threadpool

from vcasgd.api.access import READ, SUBMIT
from vcasgd.api.dependencies import SettingsDep, StorageDep
from vcasgd.api.problems import documented
from vcasgd.errors import ApiError, NotFound, PackageError
from vcasgd.schemas.jobs import DIGEST_PATTERN
from vcasgd.schemas.service import Package
from vcasgd.storage.objects import Storage
from vcasgd.task.package import check, digest_of

router = APIRouter(tags=["packages"])

#: Seconds after which an upload is refused; enough for the largest package over a slow line.
UPLOAD_SECONDS = 600.0

Digest = Annotated[
    str, Path(pattern=DIGEST_PATTERN, description="SHA-256 of the zip, in hexadecimal.")
]

_ZIP: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/zip": {"schema": {"type": "string", "format": "binary"}}},
    }
}


def object_name(digest: str) -> str:
    """Return the name of a package in the object storage."""
    return f"packages/{digest}.zip"


@router.put(
    "/packages/{digest}", dependencies=SUBMIT, openapi_extra=_ZIP, responses=documented(408, 413)
)
async def put_package(
    settings: SettingsDep, storage: StorageDep, request: Request, digest: Digest
) -> Package:
    """Store a package. Storing it again has no effect."""
    limit = int(settings.package_limit_mb * 1e6)
    try:
        async with asyncio.timeout(UPLOAD_SECONDS):
            data = await _read(request, limit)
    except TimeoutError as error:
        raise ApiError(f"request body incomplete after {UPLOAD_SECONDS:g} s", status=408) from error
    await run_in_threadpool(_store, storage, digest, data, limit)
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
            remedy="list files that are not code in .vcasgdignore, or raise "
            "VCASGD_PACKAGE_LIMIT_MB",
            status=status.HTTP_413_CONTENT_TOO_LARGE,
        )


def _store(storage: Storage, digest: str, data: bytes, limit: int) -> None:
    if digest_of(data) != digest:
        raise PackageError("the package arrived damaged: digest mismatch", field="digest")
    check(data, limit)
    if not storage.has(object_name(digest)):
        storage.put(object_name(digest), data)


@router.head(
    "/packages/{digest}", dependencies=READ, response_class=Response, responses=documented(404)
)
def head_package(storage: StorageDep, digest: Digest) -> Response:
    """Check that a package is stored."""
    if not storage.has(object_name(digest)):
        raise NotFound(f"package {digest[:12]}… is not uploaded")
    return Response()

"""Routes for files: packages of users' code, checkpoints, and finished models."""

from __future__ import annotations

import asyncio
import itertools
from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Request, Response, status
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse

from vcasgd.api.access import READ, SUBMIT, CallerDep, JobDep, Services, ServicesDep
from vcasgd.api.convert import checkpoint_rows
from vcasgd.api.problems import documented
from vcasgd.errors import (
    ApiError,
    CheckpointDamaged,
    Conflict,
    Forbidden,
    NotFound,
    PackageError,
    VcasgdError,
)
from vcasgd.limits import MAX_UPLOADED_BYTES
from vcasgd.schemas.history import BEST, LAST, CheckpointRow, chosen
from vcasgd.schemas.service import Package
from vcasgd.spec.values import DIGEST_PATTERN
from vcasgd.storage.checkpoints import Checkpoints
from vcasgd.storage.objects import Storage
from vcasgd.store.ledger.job import JobRecord
from vcasgd.task.package import check, digest_of

router = APIRouter()

# -- packages: zips that are named by their digest ----------------------------------------------

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


#: Bytes of a package that are read at a time.
CHUNK_BYTES = 1 << 20


def object_name(digest: str) -> str:
    """Return the name of a package in the object storage."""
    return f"packages/{digest}.zip"


def package_response(storage: Storage, digest: str) -> Response:
    """Return a package, of which a slow reader occupies a chunk only."""
    stream = storage.stream(object_name(digest), CHUNK_BYTES)
    headers = {"Content-Length": str(stream.size), "ETag": f'"{digest}"'}
    return StreamingResponse(stream.chunks, headers=headers, media_type="application/zip")


@router.put(
    "/packages/{digest}",
    dependencies=SUBMIT,
    openapi_extra=_ZIP,
    responses=documented(413),
    tags=["packages"],
)
async def put_package(
    services: ServicesDep, caller: CallerDep, request: Request, digest: Digest
) -> Package:
    """Store a package. Storing it again has no effect."""
    limit = int(services.settings.package_limit_mb * 1e6)
    # A package is in memory until it is stored.
    with services.uploads.taken(caller.name):
        try:
            async with asyncio.timeout(UPLOAD_SECONDS):
                data = await _read(request, limit)
        except TimeoutError as error:
            why = f"request body incomplete after {UPLOAD_SECONDS:g} s"
            raise ApiError(why, status=408) from error
        await run_in_threadpool(_store, services, caller.name, digest, data, limit)
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


def _store(services: Services, token: str, digest: str, data: bytes, limit: int) -> None:
    if digest_of(data) != digest:
        raise PackageError("the package arrived damaged: digest mismatch", field="digest")
    check(data, limit)
    if services.storage.has(object_name(digest)):
        return
    total = services.tokens.count_upload(token, len(data))
    try:
        if total > MAX_UPLOADED_BYTES:
            # Clients would send it again after a 429.
            raise Forbidden(
                f"the token {token} may upload {MAX_UPLOADED_BYTES / 1e9:g} GB of packages within "
                "a day, and has no room for this one",
                remedy="list files that are not code in .vcasgdignore, or try again tomorrow",
            )
        services.storage.put(object_name(digest), data)
    except VcasgdError:
        services.tokens.count_upload(token, -len(data))
        raise


@router.get(
    "/packages/{digest}",
    dependencies=READ,
    response_class=Response,
    responses={200: {"content": {"application/zip": {}}}},
    tags=["packages"],
)
def get_package(services: ServicesDep, digest: Digest) -> Response:
    """Download a package: the zip of a job's code."""
    return package_response(services.storage, digest)


@router.head("/packages/{digest}", dependencies=READ, response_class=Response, tags=["packages"])
def head_package(services: ServicesDep, digest: Digest) -> Response:
    """Check that a package is stored."""
    if not services.storage.has(object_name(digest)):
        raise NotFound(f"package {digest[:12]}… is not uploaded")
    return Response()


# -- checkpoints and models: safetensors files -------------------------------------------------

MEDIA_TYPE = "application/octet-stream"
_LIST = "choose one of its checkpoints, if any; vcasgd checkpoints {job} lists them"
IfNoneMatch = Annotated[str | None, Header(description="`ETag`s of the files that the client has.")]

_FILE: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "A safetensors file. Its SHA-256 is the `ETag`.",
        "content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}},
    },
    304: {"description": "The client has the file: its `ETag` is in `If-None-Match`."},
}


@router.get("/jobs/{job}/checkpoints", dependencies=READ, tags=["checkpoints"])
def list_checkpoints(services: ServicesDep, job: JobDep) -> list[CheckpointRow]:
    """List the checkpoints in the object storage, oldest first."""
    return stored_checkpoints(services, job)


def stored_checkpoints(services: Services, job: JobRecord) -> list[CheckpointRow]:
    """Return the checkpoints of a job, oldest first."""
    stored = Checkpoints(services.storage, job.id).all()
    return checkpoint_rows(job, stored, services.jobs.checkpoints(job.id))


@router.get(
    "/jobs/{job}/checkpoints/{name}",
    dependencies=READ,
    response_class=StreamingResponse,
    responses=_FILE,
    tags=["checkpoints"],
)
def get_checkpoint(
    services: ServicesDep, job: JobDep, name: str, if_none_match: IfNoneMatch = None
) -> Response:
    """Download a checkpoint: of this name or version, or the one marked `best` or `last`."""
    if not name.startswith("v"):
        found = chosen(stored_checkpoints(services, job), name)
        if found is None:
            raise _none_stored(job, name)
        name = found.name
    return _file(services.storage, job, name, if_none_match)


@router.get(
    "/jobs/{job}/model",
    dependencies=READ,
    response_class=StreamingResponse,
    responses=_FILE | documented(409),
    tags=["checkpoints"],
)
def get_model(services: ServicesDep, job: JobDep, if_none_match: IfNoneMatch = None) -> Response:
    """Download the finished model: the best one if a metric ranks the job's models, else the
    last one."""
    if job.model is None:
        raise _no_model(job)
    found = chosen(stored_checkpoints(services, job), BEST)
    return _file(services.storage, job, found.name if found else job.model, if_none_match)


def _none_stored(job: JobRecord, name: str) -> ApiError:
    if name not in (BEST, LAST):
        return NotFound(f"job {job.id} has no checkpoint {name}", remedy=_LIST.format(job=job.id))
    ranked = name == LAST or job.metric is not None
    return Conflict(
        f"job {job.id} has no {name} model"
        + (" in storage yet" if ranked else ": no metric of its evaluations ranks them"),
        remedy=_LIST.format(job=job.id) if ranked else "name the metric in stop.metric",
    )


def _no_model(job: JobRecord) -> Conflict:
    why = f"it ended without one: {job.reason}" if job.state.over else f"it is {job.state}"
    return Conflict(
        f"job {job.id} has no finished model: {why}",
        remedy=_LIST.format(job=job.id),
        traceback=job.traceback,
    )


def _file(storage: Storage, job: JobRecord, name: str, known: str | None) -> Response:
    """Return a checkpoint. ``known``: the tags of the files that the client has."""
    # A name ends with the digest of the content.
    digest = name.removesuffix(".safetensors").rpartition("-")[2]
    tag = f'"{digest}"'
    try:
        stream = Checkpoints(storage, job.id).open_stream(name)
    except NotFound:
        raise _none_stored(job, name) from None
    headers = {"ETag": tag, "Accept-Ranges": "none"}
    # Proxies that compress mark a tag as a weak one.
    tags = [each.strip().removeprefix("W/") for each in (known or "").split(",")]
    if known is not None and (known.strip() == "*" or tag in tags):
        return Response(status_code=status.HTTP_304_NOT_MODIFIED, headers=headers)
    headers |= {
        "Content-Length": str(stream.size),
        "Content-Disposition": f'attachment; filename="{job.id}-{name}"',
    }
    try:
        # Damage of a file of one chunk is found before the response starts, and of a longer one
        # before its end: the response then breaks off.
        first = next(stream.chunks, b"")
    except CheckpointDamaged as error:
        raise CheckpointDamaged(error.message, remedy=_LIST.format(job=job.id)) from error
    return StreamingResponse(
        itertools.chain([first], stream.chunks), headers=headers, media_type=MEDIA_TYPE
    )

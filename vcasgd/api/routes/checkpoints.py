"""Routes for checkpoints and finished models, as safetensors files."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Header, Response, status
from fastapi.responses import StreamingResponse

from vcasgd.api.access import READ
from vcasgd.api.dependencies import JobsDep, StorageDep
from vcasgd.api.problems import documented
from vcasgd.errors import CheckpointDamaged, Conflict
from vcasgd.schemas.history import CheckpointRow
from vcasgd.storage.checkpoints import Checkpoints
from vcasgd.storage.objects import Storage
from vcasgd.store.ledger.job import JobRecord

router = APIRouter(tags=["checkpoints"])

MEDIA_TYPE = "application/octet-stream"
IfNoneMatch = Annotated[str | None, Header(description="`ETag`s of the files that the client has.")]

_FILE: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "A safetensors file. Its SHA-256 is the `ETag`.",
        "content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}},
    },
    304: {"description": "The client has the file: its `ETag` is in `If-None-Match`."},
}


@router.get("/jobs/{job}/checkpoints", dependencies=READ, responses=documented(404))
def list_checkpoints(jobs: JobsDep, storage: StorageDep, job: str) -> list[CheckpointRow]:
    """List the checkpoints in the object storage, oldest first."""
    details = jobs.checkpoints(jobs.get(job).id)
    return [
        CheckpointRow.model_validate({**details.get(stored.name, {}), **asdict(stored)})
        for stored in Checkpoints(storage, job).all()
    ]


@router.get(
    "/jobs/{job}/checkpoints/{name}",
    dependencies=READ,
    response_class=StreamingResponse,
    responses=_FILE | documented(404),
)
def get_checkpoint(
    jobs: JobsDep, storage: StorageDep, job: str, name: str, if_none_match: IfNoneMatch = None
) -> Response:
    """Download a checkpoint."""
    return _file(storage, jobs.get(job), name, if_none_match)


@router.get(
    "/jobs/{job}/model",
    dependencies=READ,
    response_class=StreamingResponse,
    responses=_FILE | documented(404, 409),
)
def get_model(
    jobs: JobsDep, storage: StorageDep, job: str, if_none_match: IfNoneMatch = None
) -> Response:
    """Download the finished model: the checkpoint that the job ended with."""
    record = jobs.get(job)
    if record.model is None:
        raise _no_model(record)
    return _file(storage, record, record.model, if_none_match)


def _no_model(job: JobRecord) -> Conflict:
    why = f"it ended without one: {job.reason}" if job.state.over else f"it is {job.state}"
    return Conflict(
        f"job {job.id} has no finished model: {why}",
        remedy=f"list its checkpoints, if any, with GET /api/v1/jobs/{job.id}/checkpoints",
        traceback=job.traceback,
    )


def _file(storage: Storage, job: JobRecord, name: str, known: str | None) -> Response:
    """Return a checkpoint. ``known``: the tags of the files that the client has."""
    tag = f'"{_digest(name)}"'
    stream = Checkpoints(storage, job.id).open_stream(name)
    headers = {"ETag": tag, "Accept-Ranges": "none"}
    if known is not None and (known.strip() == "*" or tag in map(_strong, known.split(","))):
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
        raise CheckpointDamaged(
            error.message, remedy=f"choose another one from /api/v1/jobs/{job.id}/checkpoints"
        ) from error
    return StreamingResponse(
        itertools.chain([first], stream.chunks), headers=headers, media_type=MEDIA_TYPE
    )


def _strong(tag: str) -> str:
    """Return a tag without the mark of a weak one, which proxies that compress add."""
    return tag.strip().removeprefix("W/")


def _digest(name: str) -> str:
    """Return the digest of a checkpoint's content, which its name ends with."""
    return name.removesuffix(".safetensors").rpartition("-")[2]

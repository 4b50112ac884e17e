"""Checkpoints and the finished model, as safetensors files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from fastapi.responses import StreamingResponse

from vcasgd.api.problems import documented
from vcasgd.api.rows import CheckpointRow
from vcasgd.api.services import Here, Services
from vcasgd.errors import CheckpointDamaged, Conflict
from vcasgd.storage.checkpoints import Checkpoints
from vcasgd.store.ledger.job import JobRecord

router = APIRouter(tags=["checkpoints"])

MEDIA_TYPE = "application/octet-stream"
#: what is handed to the connection at once, so that a slow reader holds no second copy
PART_BYTES = 1 << 20

_FILE: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "A safetensors file; its SHA-256 is the `ETag`.",
        "content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}},
    }
}


@router.get("/jobs/{job}/checkpoints", responses=documented(404))
def list_checkpoints(here: Here, job: str) -> list[CheckpointRow]:
    """What the object storage has, oldest first."""
    known = here.jobs.checkpoints(here.jobs.get(job).id)
    return [
        CheckpointRow.model_validate({**known.get(stored.name, {}), **asdict(stored)})
        for stored in Checkpoints(here.storage, job).all()
    ]


@router.get(
    "/jobs/{job}/checkpoints/{name}",
    response_class=StreamingResponse,
    responses=_FILE | documented(404),
)
def get_checkpoint(here: Here, job: str, name: str) -> StreamingResponse:
    return _file(here, here.jobs.get(job), name)


@router.get(
    "/jobs/{job}/model",
    response_class=StreamingResponse,
    responses=_FILE | documented(404, 409),
)
def get_model(here: Here, job: str) -> StreamingResponse:
    """The finished model: the checkpoint that the job ended with."""
    found = here.jobs.get(job)
    if found.model is None:
        raise _no_model(found)
    return _file(here, found, found.model)


def _no_model(job: JobRecord) -> Conflict:
    why = f"it ended without one: {job.reason}" if job.state.over else f"it is {job.state}"
    return Conflict(
        f"job {job.id} has no finished model: {why}",
        remedy=f"its checkpoints, if any, are at /api/v1/jobs/{job.id}/checkpoints",
        traceback=job.traceback,
        status=409,
    )


def _file(here: Services, job: JobRecord, name: str) -> StreamingResponse:
    try:
        data = Checkpoints(here.storage, job.id).bytes(name)
    except CheckpointDamaged as error:
        raise CheckpointDamaged(
            error.message, remedy=f"take another one of /api/v1/jobs/{job.id}/checkpoints"
        ) from error
    headers = {
        "Content-Length": str(len(data)),
        "Content-Disposition": f'attachment; filename="{job.id}-{name}"',
        "ETag": f'"{_digest(name)}"',
    }
    return StreamingResponse(_parts(data), headers=headers, media_type=MEDIA_TYPE)


def _digest(name: str) -> str:
    """A checkpoint's name ends with the digest of its content, which was checked."""
    return name.removesuffix(".safetensors").rpartition("-")[2]


def _parts(data: bytes) -> Iterator[memoryview]:
    view = memoryview(data)
    for start in range(0, len(view), PART_BYTES):
        yield view[start : start + PART_BYTES]

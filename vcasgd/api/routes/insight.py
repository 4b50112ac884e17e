"""What a job did in detail: staleness, machines over time, subtasks of an epoch."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from vcasgd.api.insight import MachineView, StalenessView, SubtasksView
from vcasgd.api.problems import documented
from vcasgd.api.services import Here
from vcasgd.errors import SpecError
from vcasgd.store.ledger.subtasks import read_subtasks

router = APIRouter(tags=["insight"])

#: letters of an answer; an epoch may have a million
MOST_LETTERS = 100_000

Epoch = Annotated[int | None, Query(ge=1, description="from 1; else the one at work")]


@router.get("/jobs/{job}/staleness", responses=documented(404))
def get_staleness(here: Here, job: str) -> StalenessView:
    """How old the model was that updates started from, in versions."""
    return StalenessView.of(here.jobs.get(job))


@router.get("/jobs/{job}/machines", responses=documented(404))
def list_machines_of_job(here: Here, job: str) -> list[MachineView]:
    """What each machine did for the job, in the order of their beginnings; the newest 1000."""
    found = here.jobs.get(job)
    lanes = here.jobs.timelines(found.id)
    views = [MachineView.of(instance, lane, found) for instance, lane in lanes.items()]
    return sorted(views, key=lambda each: (each.spans[0].since if each.spans else 0, each.instance))


@router.get("/jobs/{job}/subtasks", responses=documented(404))
def get_subtasks(here: Here, job: str, epoch: Epoch = None) -> SubtasksView:
    """Where the subtasks of an epoch stand."""
    found = here.jobs.get(job)
    spec = found.spec
    wanted = min(found.finished_epochs + 1, spec.epochs) if epoch is None else epoch
    if wanted > spec.epochs:
        raise SpecError(f"epoch: the job has {spec.epochs}", field="epoch")
    per_epoch = spec.subtasks_per_epoch
    first = (wanted - 1) * per_epoch
    now = read_subtasks(here.ledger, found.id, per_epoch)
    return SubtasksView(
        epoch=wanted,
        first=first,
        total=per_epoch,
        states=now.letters(first, min(per_epoch, MOST_LETTERS)),
    )

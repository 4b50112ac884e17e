"""Trackers to which a job is exported while it runs."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, Field

from vcasgd.spec.strict import StrictModel

#: Name of the project in trackers.
PROJECT = "vcasgd"


class TrackerKind(StrEnum):
    """Trackers that jobs can be exported to."""

    TENSORBOARD = "tensorboard"
    MLFLOW = "mlflow"
    WANDB = "wandb"
    TRACKIO = "trackio"


class Track(StrictModel):
    """A tracker of a job. Its address and credentials are settings of the cluster."""

    to: TrackerKind
    project: str = Field(
        default=PROJECT,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._ -]{0,99}$",
        description="project of W&B and Trackio, or experiment of MLflow",
    )


def _each_once(tracks: tuple[Track, ...]) -> tuple[Track, ...]:
    kinds = [track.to for track in tracks]
    if twice := [kind for kind in TrackerKind if kinds.count(kind) > 1]:
        raise ValueError(f"{twice[0]} is there twice; a job has one run in each tracker")
    return tracks


Tracks = Annotated[
    tuple[Track, ...], Field(max_length=len(TrackerKind)), AfterValidator(_each_once)
]

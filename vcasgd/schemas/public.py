"""The public page for volunteers: nothing here names a machine, a token, or a job."""

from __future__ import annotations

from pydantic import Field

from vcasgd.schemas.base import Schema
from vcasgd.spec.job import JobState


class ContributionView(Schema):
    """Samples of one volunteer in a job."""

    nickname: str | None = Field(description="null: all volunteers without a nickname together.")
    samples: int = Field(description="Samples that were trained on their machines and applied.")
    share: float = Field(description="Part of all applied samples of the job, 0 to 1.")


class PublicEvaluationView(Schema):
    """Latest evaluation of a job's model."""

    metric: str
    value: float
    epoch: float
    at: float = Field(description="Unix time.")


class PublicJobView(Schema):
    """A job whose specification contains `public`."""

    title: str
    description: str
    state: JobState
    progress: float = Field(description="Applied part of all samples, 0 to 1.")
    samples: int = Field(description="Applied samples.")
    total_samples: int | None = Field(description="Samples of the whole job, if they are known.")
    evaluation: PublicEvaluationView | None
    machines: int = Field(description="Machines that work for the job now.")
    contributions: list[ContributionView] = Field(description="Most samples first.")
    own_samples: int = Field(description="Applied samples of the cluster's own machines.")


class VolunteersView(Schema):
    """Public jobs, newest first, and who contributed how much to each."""

    jobs: list[PublicJobView]

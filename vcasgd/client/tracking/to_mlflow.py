"""Runs of MLflow, on the server or in the store that ``MLFLOW_TRACKING_URI`` names.

A tag of the run has the position, so any computer can continue an export.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from vcasgd.client.tracking.base import Points, Position, Tracker, parameters
from vcasgd.errors import ApiError
from vcasgd.schemas.jobs import JobView
from vcasgd.spec.job import JobState

#: Tags with the job's ID, and with the position.
JOB_TAG, POSITION_TAG = "vcasgd.job", "vcasgd.exported"
#: Values and parameters that MLflow accepts at once, and characters of a parameter.
MAX_METRICS, MAX_PARAMETERS, MAX_PARAMETER_LENGTH = 1000, 100, 500
_STATES = {JobState.SUCCEEDED: "FINISHED", JobState.CANCELLED: "KILLED"}


class MlflowRun(Tracker):
    """The run with the job's tag in an experiment, which is created unless it exists."""

    def __init__(self, job: JobView, folder: Path, experiment: str) -> None:  # noqa: ARG002
        with _errors():
            self._client = MlflowClient()
            self._experiment = self._experiment_id(experiment)
            run = self._find(job.id) or self._create(job)
        self._run = run.info.run_id
        self.position = Position.parse(
            run.data.tags.get(POSITION_TAG), f"tag {POSITION_TAG} of run {self._run}"
        )

    @property
    def place(self) -> str:
        uri = self._client.tracking_uri
        return f"{uri} experiment {self._experiment} run {self._run}"

    def log(self, points: Sequence[Points]) -> None:
        rows = [
            Metric(name, value, int(point.at * 1000), point.step)
            for point in points
            for name, value in point.values.items()
        ]
        position = points[-1].position
        with _errors():
            while len(rows) > MAX_METRICS:
                self._client.log_batch(self._run, metrics=rows[:MAX_METRICS])
                del rows[:MAX_METRICS]
            tag = RunTag(POSITION_TAG, position.model_dump_json())
            self._client.log_batch(self._run, metrics=rows, tags=[tag])
        self.position = position

    def close(self, ended: JobView | None = None) -> None:
        if ended is not None:
            with _errors():
                self._client.set_terminated(self._run, _STATES.get(ended.state, "FAILED"))

    def _experiment_id(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name))

    def _find(self, job: str) -> Run | None:
        wanted = f"tags.`{JOB_TAG}` = '{job}'"
        found = self._client.search_runs([self._experiment], wanted, max_results=1)
        return found[0] if found else None

    def _create(self, job: JobView) -> Run:
        run = self._client.create_run(
            self._experiment,
            start_time=int((job.started_at or job.created_at) * 1000),
            tags={JOB_TAG: job.id, "mlflow.user": job.owner or "", "vcasgd.package": job.package},
            run_name=job.id,
        )
        params = [
            Param(name, str(value)[:MAX_PARAMETER_LENGTH])
            for name, value in parameters(job).items()
        ]
        for first in range(0, len(params), MAX_PARAMETERS):
            part = params[first : first + MAX_PARAMETERS]
            self._client.log_batch(run.info.run_id, params=part)
        return run


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except MlflowException as error:
        raise ApiError(f"MLflow: {error}", remedy="check MLFLOW_TRACKING_URI") from error

"""One job as a value, and how it is read from what the ledger has of it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from operator import itemgetter
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from vcasgd.spec.job import DEFAULT_METRICS, JobSpec, Metric
from vcasgd.store.ledger.progress import ShardProgress
from vcasgd.store.ledger.tuning import Tuned

#: of a job; a script on the ledger goes through them
MOST_SHARDS = 1024


class JobState(StrEnum):
    """``starting`` → ``running`` ⇄ ``paused`` → ``finishing`` → one of the last three."""

    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHING = "finishing"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def over(self) -> bool:
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


@dataclass(frozen=True)
class ModelFacts:
    """What only the user's code knows; found out by the worker that made the first snapshot."""

    samples: int
    validation_samples: int
    #: the model's :class:`~vcasgd.learning.vector.Layout` as JSON
    layout: str
    order_digest: str
    #: into how many the vector is cut, shard k on store node k; the same for the job's life
    shards: Annotated[int, Field(ge=1, le=MOST_SHARDS)] = 1

    @classmethod
    def from_json(cls, text: str | bytes) -> ModelFacts:
        """Raises :class:`ValueError`."""
        return _FACTS.validate_json(text)

    def to_dict(self) -> dict[str, Any]:
        return {
            "samples": self.samples,
            "validation_samples": self.validation_samples,
            "layout": self.layout,
            "order_digest": self.order_digest,
            "shards": self.shards,
        }


@dataclass(frozen=True)
class Evaluation:
    """The result of one evaluation on the validation split."""

    epoch: int
    version: int
    metrics: dict[str, float]
    worker: str
    seconds: float
    at: float
    #: of the model in each shard; ``version`` is that of the first
    versions: tuple[int, ...] = ()


@dataclass(frozen=True)
class JobRecord:
    """A job as the ledger has it. Times are Unix seconds."""

    id: str
    spec: JobSpec
    state: JobState
    package: str
    created_at: float
    #: of the request that submitted it
    request: str | None = None
    started_at: float | None = None
    ended_at: float | None = None
    reason: str | None = None
    traceback: str | None = None
    facts: ModelFacts | None = None
    #: cumulative, from the snapshots: updates, samples, staleness_sum, staleness_max, …
    totals: dict[str, Any] = field(default_factory=dict)
    finished_epochs: int = 0
    version: int = 0
    evaluations: tuple[Evaluation, ...] = ()
    #: the epoch whose model the job ends with, from `finishing` on
    final_epoch: int | None = None
    #: the checkpoint that holds the finished model
    model: str | None = None
    #: machines that the job lost: with a notice, and without
    evictions: int = 0
    kills: int = 0
    #: what was found by measuring it
    tuned: Tuned = field(default_factory=Tuned)

    @property
    def metric(self) -> Metric | None:
        """The metric that ranks the job's epochs.

        It is the one that the specification names; else ``accuracy``, else ``loss``. None if no
        evaluation contains it.
        """
        chosen = self.spec.stop.chosen_metric
        metrics = (chosen,) if chosen else DEFAULT_METRICS
        measured = {name for each in self.evaluations for name in each.metrics}
        return next((metric for metric in metrics if metric.name in measured), None)

    @property
    def best(self) -> Evaluation | None:
        """The evaluation with the best finite value of :attr:`metric`, the first one of several.

        It is the last evaluation if there is no such value, and None before the first one.
        """
        metric = self.metric
        ranked = [
            (quality, each)
            for each in self.evaluations
            if metric and (quality := metric.quality(each.metrics)) is not None and quality > -inf
        ]
        if ranked:
            return max(ranked, key=itemgetter(0))[1]
        return self.evaluations[-1] if self.evaluations else None


@dataclass(frozen=True)
class Failure:
    """An error of the user's code; ``fatal``: no other machine will do better."""

    worker: str
    piece: str
    message: str
    traceback: str
    fatal: bool


_FACTS, _FAILURE = TypeAdapter(ModelFacts), TypeAdapter(Failure)
_EVALUATION = TypeAdapter(Evaluation)


def read_failure(text: bytes) -> Failure | None:
    """None where it is none: workers write them."""
    try:
        return _FAILURE.validate_json(text)
    except ValueError:
        return None


def read_job(
    job: str,
    record: dict[bytes, bytes],
    facts_text: bytes | None,
    finished: int,
    told: dict[bytes, bytes],
    evaluations: dict[bytes, bytes],
    vanished: list[str],
) -> JobRecord:
    """Raises :class:`ValueError`, :class:`TypeError`, :class:`KeyError` where it makes no sense."""
    text = {name.decode(): value.decode() for name, value in record.items()}
    results = sorted(
        (_evaluation(int(epoch), json.loads(each)) for epoch, each in evaluations.items()),
        key=lambda each: each.epoch,
    )
    facts = ModelFacts.from_json(facts_text) if facts_text is not None else None
    progress = ShardProgress.of(told, facts.shards if facts else 1)
    return JobRecord(
        id=job,
        spec=JobSpec.parse(json.loads(text["spec"])),
        state=JobState(text["state"]),
        package=text["package"],
        created_at=float(text["created_at"]),
        request=text.get("request") or None,
        started_at=_number(text.get("started_at")),
        ended_at=_number(text.get("ended_at")),
        reason=text.get("reason") or None,
        traceback=text.get("traceback") or None,
        facts=facts,
        totals=progress.totals,
        finished_epochs=finished,
        version=progress.version,
        evaluations=tuple(results),
        final_epoch=int(text["final_epoch"]) if text.get("final_epoch") else None,
        model=text.get("model") or None,
        evictions=vanished.count("evicted"),
        kills=vanished.count("killed"),
    )


def _evaluation(epoch: int, fields: dict[str, Any]) -> Evaluation:
    versions = tuple(fields.pop("versions", ())) or (fields["version"],)
    return _EVALUATION.validate_python({**fields, "epoch": epoch, "versions": versions})


def _number(text: str | None) -> float | None:
    return float(text) if text else None

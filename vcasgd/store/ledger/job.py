"""Values of a job: its record, state, facts, and results, parsed from the ledger."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf
from operator import itemgetter
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from vcasgd.errors import Cause, JobUnreadable, NotFound, SpecError
from vcasgd.learning.evaluation import EvaluationPoints, points_for, without_improvement
from vcasgd.learning.length import plan_for
from vcasgd.learning.local_batch import most_workers
from vcasgd.learning.shards import MAX_SHARDS_OF_NODE
from vcasgd.learning.subtasks import EpochPlan
from vcasgd.printable import printable
from vcasgd.schemas.base import Count, Name
from vcasgd.spec.job import CHANGEABLE, MAX_SUBTASKS, JobSpec
from vcasgd.spec.job import JobState as JobState
from vcasgd.spec.sections import DEFAULT_METRICS, Metric, place_of
from vcasgd.spec.update import RoundsSpec, Update
from vcasgd.store.keys import LedgerKeys
from vcasgd.store.ledger.tuning import Tuned
from vcasgd.store.ledger.untrusted import (
    MAX_FACTS_LENGTH,
    Invalid,
    Result,
    Text,
    check_layout,
    check_length,
    count,
    parse,
    reason_of,
)

#: Name in place of a work item in the report of a process that ended unexpectedly.
PROCESS = "process"
#: The same in that of a worker that can't prepare the job.
PREPARE = "prepare"
#: Counters of leases that workers can write.
COUNTERS = ("next", "tokens", "expired", "overtaken")
#: States in which a job has machines.
WITH_MACHINES = (JobState.STARTING, JobState.RUNNING)
#: Most shards of a job; scripts on the ledger loop over them.
MAX_SHARDS = 1024
#: Most notes of a worker about a job.
MAX_NOTES = 16
#: Kinds of notes that require no action.
QUIET_NOTES = (
    "batch-weights", "codec-chosen", "momentum-starts-again", "norm-of-parts", "state-beside",
)  # fmt: skip
#: Largest staleness that is counted separately, because the counts are part of every snapshot.
MAX_STALENESS = 32


#: Kind of an event that a worker notes.
NoteKind = Annotated[str, Field(pattern=r"^[a-z][a-z-]{0,39}$")]


@dataclass(frozen=True)
class ModelFacts:
    """Facts from the user's code, reported by the worker that created the first snapshot."""

    samples: Count
    validation_samples: Count
    #: The model's :class:`~vcasgd.learning.layout.Layout` as JSON.
    layout: str
    order_digest: Name
    #: Number of shards, constant for the job.
    shards: Annotated[int, Field(ge=1, le=MAX_SHARDS)] = 1
    #: Number of store nodes, each of which has as many of the shards; 0: one.
    nodes: Annotated[int, Field(ge=0, le=MAX_SHARDS)] = 0
    #: Samples in a local step of the task, if it is known.
    batch_size: Annotated[Count, Field(ge=1)] | None = None
    #: Mean weight of a sample in the first batch; None if batches count by their samples.
    batch_weight: Annotated[float, Field(gt=0, le=1e15, allow_inf_nan=False)] | None = None
    #: JSON of the :class:`~vcasgd.learning.batch_weights.CountedLabels` by which they count; empty
    #: if the task says how.
    batch_labels: Annotated[str, Field(max_length=1 << 17), AfterValidator(printable)] = ""
    #: Samples that a worker's part of a batch needs, if it is known, and the reason for people.
    min_local_batch: Annotated[Count, Field(ge=1)] | None = None
    min_local_batch_why: Name = ""
    #: True if the loss of a batch is a sum over its samples, so that a part's is smaller.
    sums_losses: bool = False
    #: What the job does otherwise than one process, by the kinds of their events.
    notes: Annotated[dict[NoteKind, Text], Field(max_length=MAX_NOTES)] = field(
        default_factory=dict
    )
    #: Subtasks per epoch; None: those of the specification.
    subtasks_per_epoch: Annotated[int, Field(ge=1, le=MAX_SUBTASKS)] | None = None
    #: The model's :class:`~vcasgd.worker.adapter.Adapter` as JSON; empty if it has none.
    adapter: str = ""
    #: The training set's :class:`~vcasgd.learning.sample_content.SampleContent` as JSON.
    content: str = ""
    #: The encoding under ``codec: auto``.
    codec: Literal["float32", "int8", "int2"] = "float32"
    #: GPUs of a machine that train as one worker if the job names none, and why they were chosen;
    #: empty if the first machine had no choice.
    gpus: Literal["all", 1] = 1
    gpus_why: Name = ""
    #: Samples in each shard of data that can only be iterated over; empty for other data.
    shard_lengths: Annotated[tuple[Count, ...], Field(max_length=1024)] = ()

    @classmethod
    def from_json(cls, text: bytes) -> ModelFacts:
        """Parse untrusted JSON. Raises :class:`~vcasgd.store.ledger.untrusted.Invalid`."""
        check_length(text, MAX_FACTS_LENGTH)
        try:
            facts = _FACTS.validate_json(text, strict=True)
        except ValidationError as error:
            raise Invalid(reason_of(error)) from error
        check_layout(facts.layout)
        most = facts.store_nodes * MAX_SHARDS_OF_NODE
        if facts.shards > most or facts.shards % facts.store_nodes:
            raise Invalid(f"shards: {facts.shards} on {facts.store_nodes} store nodes")
        return facts

    @property
    def store_nodes(self) -> int:
        return self.nodes or self.shards

    @property
    def takes_turns(self) -> bool:
        """True if workers may exchange the shards of a store node in turn."""
        return self.shards > self.store_nodes

    def shards_of(self, node: int) -> range:
        """Return the shards on a store node."""
        each = self.shards // self.store_nodes
        return range(node * each, (node + 1) * each)

    def shards_beside(self, shard: int) -> range:
        """Return the shards on the store node of a shard."""
        return self.shards_of(shard * self.store_nodes // self.shards)

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as JSON values."""
        return asdict(self)

    def plan(self, spec: JobSpec) -> EpochPlan:
        """Return the division of a job into subtasks, without the blocks of its data set.

        Raises :class:`SpecError` if the facts, which a worker wrote, don't fit the specification.
        """
        batch_size = self.batch_size or 1
        return plan_for(spec, self.samples, batch_size, subtasks=self.subtasks_per_epoch)

    def update(self, spec: JobSpec) -> Update:
        """Return the section ``update`` of a job with the encoding in use."""
        if spec.update.codec != "auto":
            return spec.update
        return spec.update.model_copy(update={"codec": self.codec})

    def most_workers(self, spec: JobSpec) -> int | None:
        """Return how many workers can train together at most; None if that isn't limited."""
        divided = isinstance(spec.update, RoundsSpec) and spec.batch == "job"
        if not divided or self.batch_size is None or self.min_local_batch is None:
            return None
        return most_workers(self.batch_size, self.min_local_batch)

    def points(self, spec: JobSpec) -> EvaluationPoints:
        """Return the points at which a job's model is evaluated. Raises as :meth:`plan`."""
        return points_for(spec.evaluate, self.plan(spec), self.batch_size or 1)


class Evaluation(Result):
    """The result of one evaluation on the validation split.

    ``version`` is that of the first shard; ``samples`` in the model, and its ``step``, are None if
    they are unknown. ``rollbacks`` before the model are the lowest of all shards.
    """

    #: Number of its point; see :class:`~vcasgd.learning.evaluation.EvaluationPoints`.
    number: int
    step: int | None = None
    #: Number of the epoch that ended, or the samples in epochs.
    epoch: float = 0.0

    @property
    def place(self) -> str:
        """The place in the job, such as ``epoch 3``, or ``epoch 2.47, step 1200``."""
        return place_of(self.epoch, self.step)


@dataclass(frozen=True)
class JobRecord:
    """A job, as recorded in the ledger. Times are Unix seconds."""

    id: str
    spec: JobSpec
    state: JobState
    package: str
    created_at: float
    #: ID of the request that submitted the job.
    request: str | None = None
    #: User who submitted it: the name of an API token, if one was used.
    owner: str | None = None
    #: Most machines of all jobs of the owner when it was submitted; its token may have another one.
    owner_limit: int | None = None
    started_at: float | None = None
    ended_at: float | None = None
    reason: str | None = None
    traceback: str | None = None
    facts: ModelFacts | None = None
    #: Cumulative totals from the snapshots: updates, samples, staleness_sum, staleness_max, …
    totals: dict[str, Any] = field(default_factory=dict)
    finished_epochs: int = 0
    version: int = 0
    evaluations: tuple[Evaluation, ...] = ()
    #: Number of the evaluation whose model becomes the job's result; set from ``finishing``.
    final_evaluation: int | None = None
    #: The checkpoint with the final model.
    model: str | None = None
    #: Machines that the job lost, with a notice and without.
    evictions: int = 0
    kills: int = 0
    #: Values tuned from measurements.
    tuned: Tuned = field(default_factory=Tuned)
    #: Why a part that workers write can't be read, if so; the record then lacks that part, and the
    #: controller fails the job.
    invalid: str | None = None
    #: Why the job has fewer machines than it could use, or that they boot, as of the last round of
    #: the controller.
    waiting: str | None = None
    #: Its place among the jobs that wait for machines, from 1, and their number.
    queue: tuple[int, int] | None = None
    #: True if it has no machine yet.
    queued: bool = False
    #: What the job does otherwise than one process would, for people.
    notes: tuple[str, ...] = ()
    #: Those of the notes that its user may want to act on.
    warnings: tuple[str, ...] = ()
    #: Its outlook on its deadline, for people, as of the controller.
    outlook: str | None = None

    @property
    def plan(self) -> EpochPlan | None:
        """The division of the job into subtasks.

        None before the first snapshot, and if the reported facts are invalid, which fails the job.
        """
        try:
            return self.facts.plan(self.spec) if self.facts else None
        except SpecError:
            return None

    @property
    def deadline(self) -> float | None:
        """When the job has to end, in Unix seconds; None without a deadline."""
        return self.spec.deadline(self.created_at)

    @property
    def samples(self) -> tuple[int, int | None]:
        """The samples that are applied, and those of the whole job if they are known."""
        total = self.plan.total_samples if self.plan else self.spec.max_samples
        return int(self.totals.get("applied", 0)), total

    @property
    def idle(self) -> str | None:
        """Why some of the job's workers have no work, for people; None if all have."""
        most = self.facts.most_workers(self.spec) if self.facts else None
        if self.facts is None or most is None or most >= self.spec.workers.max:
            return None
        samples = self.facts.min_local_batch
        why = f", because {why}" if (why := self.facts.min_local_batch_why) else ""
        return (
            f"{most} of {self.spec.workers.max} workers have work: a part of a batch of "
            f"{self.facts.batch_size} samples needs at least {samples}{why}; "
            "min_local_batch sets another size"
        )

    @property
    def points(self) -> EvaluationPoints | None:
        """The points at which the model is evaluated; None if :attr:`plan` is."""
        return self.facts.points(self.spec) if self.facts and self.plan else None

    @property
    def epochs(self) -> int | None:
        """Number of epochs, of which the last may be cut short; None while it is unknown."""
        return self.plan.epochs if self.plan else self.spec.epochs

    @property
    def metric(self) -> Metric | None:
        """The metric that ranks the job's evaluated models.

        It is the one that the specification names; else ``accuracy``, else ``loss``. None if no
        evaluation contains it.
        """
        chosen = self.spec.stop.chosen_metric
        metrics = (chosen,) if chosen else DEFAULT_METRICS
        measured = {name for each in self.evaluations for name in each.metrics}
        return next((metric for metric in metrics if metric.name in measured), None)

    @property
    def without_improvement(self) -> int:
        """Number of evaluations since the best value of :attr:`metric`; 0 without a metric."""
        if (metric := self.metric) is None:
            return 0
        qualities = (metric.quality(each.metrics) for each in self.evaluations)
        return without_improvement(each for each in qualities if each is not None)

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
    """An error that ended work on a job, and whose fault it is.

    ``diverged``: a loss or a parameter was not finite. ``ended``: it is no error, but a loop of the
    user's code that decided to end the training. ``rollbacks`` is that of the model from
    which the work started. ``at`` is the ledger's Unix time of the report, and ``version`` the
    model's at that time.
    """

    worker: str
    piece: str
    message: Text
    traceback: Text
    fault: Cause
    diverged: bool = False
    ended: bool = False
    rollbacks: int = 0
    at: float = 0.0
    version: int = 0


def combined_totals(reports: Mapping[bytes, bytes], shards: int) -> dict[str, Any]:
    """Combine the totals of all shards in :attr:`~vcasgd.store.keys.LedgerKeys.shards`.

    An update has a part in each shard. Counts and means are those of the first shard. ``applied``
    and ``restorations`` are minima, and ``repeated`` is the largest magnitude, over shards.
    Rejected parts are summed, because each has its own cause.
    """
    totals = [json.loads(reports.get(b"%d:totals" % shard, b"{}")) for shard in range(shards)]
    first: dict[str, Any] = totals[0]
    if len(totals) == 1 or not first:
        return first
    rejected: Counter[str] = Counter()
    for each in totals:
        rejected.update(each.get("rejected", {}))
    return {
        **first,
        "applied": min(each.get("applied", 0) for each in totals),
        "restorations": min(each.get("restorations", 0) for each in totals),
        "repeated": max((each.get("repeated", 0) for each in totals), key=abs),
        "rejected": dict(rejected),
    }


_FACTS, _FAILURE = TypeAdapter(ModelFacts), TypeAdapter(Failure)
_RECORD = TypeAdapter(JobRecord)


def as_count(text: bytes | None) -> int:
    """Parse an untrusted counter. Returns 0 if it is not a count."""
    try:
        return count(text or b"0")
    except Invalid:
        return 0


def read_failure(text: bytes) -> Failure | None:
    """Parse an untrusted failure. Returns None if it is invalid."""
    try:
        return _FAILURE.validate_json(text)
    except ValueError:
        return None


def no_such_job(job: str) -> NotFound:
    return NotFound(f"there is no job {job}", remedy="vcasgd jobs lists the IDs of jobs")


def request_job(pipe: Any, job: str) -> None:
    """Add the commands that read a job; :func:`read_job` takes the answers."""
    keys = LedgerKeys(job)
    pipe.hgetall(keys.record)
    pipe.hget(keys.facts, "facts")
    pipe.hmget(keys.work, "finished", "waiting", "queue", "notes", "outlook")
    pipe.hgetall(keys.shards)
    pipe.hgetall(keys.evaluations)
    pipe.hvals(keys.vanished)
    pipe.hgetall(keys.tuning)
    pipe.hmget(keys.counters, *COUNTERS)


def read_job(job: str, answers: Sequence[Any]) -> JobRecord:
    """Parse a job from the ledger's hashes.

    Of what workers write, parts that are invalid are left out; :attr:`JobRecord.invalid` names the
    first one. Raises :class:`NotFound`, and :class:`JobUnreadable` for invalid contents that only
    the platform writes.
    """
    if not answers[0]:
        raise no_such_job(job)
    try:
        return _parsed(job, *answers)
    except (ValueError, TypeError, KeyError, AttributeError, SpecError) as error:
        raise JobUnreadable(f"the stored data of job {job} is not valid: {error}") from error


def _parsed(
    job: str,
    record: Mapping[bytes, bytes],
    facts_text: bytes | None,
    work: Sequence[bytes | None],
    shards: Mapping[bytes, bytes],
    evaluations: Mapping[bytes, bytes],
    vanished: list[bytes],
    tuning: Mapping[bytes, bytes],
    counters: Sequence[bytes | None],
) -> JobRecord:
    # An empty field is a missing one.
    stored = {name.decode(): value.decode() for name, value in record.items() if value}
    facts, problem = _read_facts(facts_text)
    finished, waiting, queue, notes, outlook = work
    waits = bool(waiting) and stored["state"] in WITH_MACHINES
    place = json.loads(queue or b"{}") if waits else {}
    starting = stored["state"] == JobState.STARTING
    noted: dict[str, str] = json.loads(notes or b"{}")
    read = _RECORD.validate_python(
        {
            **stored,
            "id": job,
            "spec": _spec(stored),
            "facts": facts,
            "totals": combined_totals(shards, facts.shards if facts else 1),
            "finished_epochs": finished or 0,
            "version": shards.get(b"0:version", 0),
            "evictions": vanished.count(b"evicted"),
            "kills": vanished.count(b"killed"),
            "tuned": Tuned.of(tuning),
            "waiting": waiting if waits else None,
            "queue": (place["position"], place["length"]) if place.get("position") else None,
            "queued": starting and not place.get("has_machines", True),
            "notes": tuple(noted.values()),
            "warnings": tuple(text for kind, text in noted.items() if kind not in QUIET_NOTES),
            "outlook": outlook if outlook and stored["state"] in WITH_MACHINES else None,
        }
    )
    results, wrong_result = _read_evaluations(evaluations, facts, read.points)
    of_shard = next((why for name, why in shards.items() if name.endswith(b":invalid")), b"")
    invalid = problem or wrong_result or of_shard.decode() or _wrong_counter(counters)
    return replace(read, evaluations=results, invalid=invalid)


def _wrong_counter(values: Sequence[bytes | None]) -> str | None:
    """Return why the first counter of leases that can't be read is wrong, else None."""
    for name, value in zip(COUNTERS, values, strict=True):
        try:
            count(value or b"0")
        except Invalid as error:
            return f"a worker wrote the counter {name}, which can't be read: {error}"
    return None


def _spec(text: Mapping[str, str]) -> JobSpec:
    """Return the specification, with the fields that were changed later, which are JSON."""
    changed = {name: json.loads(text[name]) for name in CHANGEABLE if name in text}
    return JobSpec.parse(json.loads(text["spec"]) | changed)


def _read_facts(text: bytes | None) -> tuple[ModelFacts | None, str | None]:
    """Return the facts, None if there are none or they are invalid, and why they are."""
    try:
        return (ModelFacts.from_json(text) if text is not None else None), None
    except Invalid as error:
        return None, f"a worker wrote facts that can't be read: {error}"


def _read_evaluations(
    rows: Mapping[bytes, bytes], facts: ModelFacts | None, points: EvaluationPoints | None
) -> tuple[tuple[Evaluation, ...], str | None]:
    """Return the valid evaluations in order, and why the first other one is invalid."""
    valid, problem = [], None
    for name, text in rows.items():
        try:
            valid.append(_evaluation(count(name), text, facts, points))
        except Invalid as error:
            where = name[:20].decode(errors="replace")
            problem = problem or f"a worker wrote evaluation {where}, which can't be read: {error}"
    return tuple(sorted(valid, key=lambda each: each.number)), problem


def _evaluation(
    number: int, text: bytes, facts: ModelFacts | None, points: EvaluationPoints | None
) -> Evaluation:
    read = parse(Result, text)
    fields = {**dict(read), "versions": read.versions or (read.version,)}
    result = Evaluation(**fields, number=number, epoch=float(number))
    if facts is not None and len(result.versions) != facts.shards:
        raise Invalid(f"versions: {len(result.versions)}, but the job has {facts.shards} shards")
    return result if facts is None or points is None else completed(result, facts, points)


def completed(result: Evaluation, facts: ModelFacts, points: EvaluationPoints) -> Evaluation:
    """Return a result with its epoch and step, which derive from its samples."""
    least = points.samples_at(result.number)
    samples = least if result.samples is None else result.samples
    # At the end of an epoch, a part of the next one may be applied already.
    counted = least if points.at_epochs else samples
    step = samples // facts.batch_size if facts.batch_size else None
    place = {"samples": samples, "step": step, "epoch": counted / facts.samples}
    return result.model_copy(update=place)

"""Cases of ``tests/compat``: a task or script as users write it, and its plain twin.

The twin is an ordinary loop over full batches, from the same first model and in the same order of
samples. Most cases run in one process, with the product's learners and rules on simulated machines
(:func:`simulated`); what needs processes runs on real workers (:func:`on_workers`). All settings
but the length are defaults, and rounds have one local step, as when exchanges are fast.
"""

from __future__ import annotations

import inspect
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import Dataset, TensorDataset, default_collate

import vcasgd
from support.harness import Harness
from support.waiting import await_truth
from vcasgd.fleet.histories import always
from vcasgd.learning.subtasks import EpochPlan
from vcasgd.session.script import load
from vcasgd.simulation.job import Conditions, Simulation
from vcasgd.spec.job import JobSpec
from vcasgd.store.ledger.job import JobRecord, JobState

#: Numbers of workers that each case must hold for, and those that a few seconds allow.
WORKERS, FEW = (1, 4, 8), (4,)
#: Seeds of the models and orders.
SEEDS = (0, 1)
#: Largest difference from the twin: relative for a loss, absolute for an accuracy; and as a
#: multiple of the twin's standard deviation over the seeds.
WITHIN, OF_NOISE = 0.01, 1.5
#: Seconds for a job of real workers on a busy machine.
JOB_SECONDS = 240

Metrics = dict[str, float]

#: The grid of a case: ``@grid`` runs a test ``(workers: int)`` with 4 workers, and with
#: ``--extended`` with 1 and 8.
grid = pytest.mark.parametrize(
    "workers",
    [
        workers if workers in FEW else pytest.param(workers, marks=pytest.mark.extended)
        for workers in WORKERS
    ],
)


@dataclass(frozen=True)
class Case:
    """A task and its twin, which end after ``epochs`` with a ``metric``.

    ``task`` makes the task of one worker. ``twin`` trains in an ordinary loop with a seed and
    returns the metrics at its end, :func:`plain` by default. ``fields`` are more fields of the job.
    """

    task: Callable[[], vcasgd.Task]
    epochs: int = 4
    metric: str = "loss"
    twin: Callable[[int], Metrics] | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    def plain(self, seed: int) -> float:
        """Return the metric of the twin."""
        twin = self.twin or (lambda seed: plain(self.task(), self.epochs, seed))
        return twin(seed)[self.metric]

    def simulated(self, workers: int, seed: int) -> float:
        """Return the metric of a job of simulated workers."""
        return simulated(self.task, workers, seed, epochs=self.epochs, **self.fields)[self.metric]


def assert_as_plain(case: Case, workers: int, seeds: Sequence[int] = SEEDS) -> None:
    """Fail if a job of so many workers ends worse than the case's twin."""
    plain_ends = [case.plain(seed) for seed in seeds]
    ends = [case.simulated(workers, seed) for seed in seeds]
    assert_close(ends, plain_ends, case.metric)


def assert_close(ends: Sequence[float], plain_ends: Sequence[float], metric: str = "loss") -> None:
    """Fail if the ends of jobs are worse than those of their twins, one for each seed."""
    expected, mean = statistics.mean(plain_ends), statistics.mean(ends)
    noise = statistics.stdev(plain_ends) if len(plain_ends) > 1 else 0.0
    most = max(WITHIN if metric == "accuracy" else WITHIN * abs(expected), OF_NOISE * noise)
    worse = expected - mean if metric == "accuracy" else mean - expected
    assert worse <= most, f"{metric} {ends} instead of {plain_ends}, ±{most:.4f}"


# -- twins -----------------------------------------------------------------------------------------


def plain(task: vcasgd.Task, epochs: int, seed: int) -> Metrics:
    """Train a task as an ordinary script does, and return its metrics."""
    torch.manual_seed(seed)
    model = task.model()
    optimizer = task.optimizer([each for each in model.parameters() if each.requires_grad])
    return train_plainly(task, model, optimizer, epochs, seed)


def train_plainly(
    task: vcasgd.Task, model: nn.Module, optimizer: Optimizer, epochs: int, seed: int
) -> Metrics:
    """Do what :func:`plain` does with a model and its optimizer."""
    rates = [(group, group["lr"]) for group in optimizer.param_groups]
    data, done = task.dataset("train"), 0
    total = epochs * len(data)  # type: ignore[arg-type]
    for indices in orders(len(data), epochs, seed, task.batch_size):  # type: ignore[arg-type]
        for group, rate in rates:
            group["lr"] = rate * task.schedule(done / total)
        optimizer.zero_grad()
        loss = task.loss(model, task.collate([data[index] for index in indices]))
        loss.backward()  # type: ignore[no-untyped-call]
        if task.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), task.clip_norm)
        optimizer.step()
        done += len(indices)
    return evaluate_plainly(task, model)


def orders(samples: int, epochs: int, seed: int, size: int) -> Iterable[list[int]]:
    """Yield the samples of each batch, in the order of a job with this seed."""
    plan = EpochPlan(samples, 1, epochs, seed)
    for epoch in range(epochs):
        indices = plan.indices(epoch, 0, samples).tolist()
        for start, stop in pairwise([*range(0, samples, size), samples]):
            yield indices[start:stop]


@torch.no_grad()
def evaluate_plainly(task: vcasgd.Task, model: nn.Module) -> Metrics:
    """Return the means of a task's metrics over its validation data."""
    model.eval()
    data, sums = task.dataset("validation"), defaultdict[str, float](float)
    size = len(data)  # type: ignore[arg-type]
    for start in range(0, size, task.evaluation_batch_size):
        indices = range(start, min(start + task.evaluation_batch_size, size))
        for name, value in task.evaluate(model, task.collate([data[i] for i in indices])).items():
            sums[name] += float(value)
    count = sums.pop("count")
    return {name: value / count for name, value in sums.items()}


# -- jobs ------------------------------------------------------------------------------------------


def simulated(
    make_task: Callable[[], vcasgd.Task], workers: int, seed: int = 0, **fields: Any
) -> Metrics:
    """Return the metrics at the end of a job of simulated workers.

    Fails if the job diverges. Raises what the task's code raises, and refusals.
    """
    job = {"name": "case", "task": "case:Case", "seed": seed, "workers": _exactly(workers)}
    spec = JobSpec.parse({**job, **({} if _has_length(fields) else {"epochs": 4}), **fields})
    # Exchanges take no time, so all rounds but the first have one local step.
    outcome = Simulation(spec, make_task, Conditions(always(workers), seed=seed)).run()
    assert outcome.divergence is None, outcome.divergence
    return outcome.points[-1].metrics


#: Tasks of scripts that the present test has made.
made: list[vcasgd.Task] = []


def script(source: str, folder: Path, name: str = "train.py") -> Callable[[], vcasgd.Task]:
    """Write a script; return a function that makes its task for one worker.

    The tests of tests/compat end its loops.
    """
    path = folder / name
    path.write_text(inspect.cleandoc(source) + "\n")

    def make_task() -> vcasgd.Task:
        made.append(load(path.name, {}, folder))
        return made[-1]

    return make_task


def on_workers(
    harness: Harness, folder: Path, task: str, workers: int, **fields: Any
) -> tuple[Metrics, JobRecord]:
    """Run a job of real worker processes to its end; return its last metrics and its record.

    ``task`` is as in a job file, in ``folder``. A job that fails is returned, too.
    """
    harness.start_server()
    harness.start_job_loop()
    length = {} if _has_length(fields) else {"epochs": 4}
    job = harness.submit(folder, task=task, workers=_exactly(workers), **length, **fields)
    harness.start_workers(job, workers)
    await_truth(lambda: harness.jobs.get(job).state in ENDED, JOB_SECONDS)
    record = harness.jobs.get(job)
    return (record.evaluations[-1].metrics if record.evaluations else {}), record


ENDED = (JobState.SUCCEEDED, JobState.FAILED)


def _exactly(workers: int) -> dict[str, int]:
    return {"min": workers, "max": workers}


def _has_length(fields: Mapping[str, Any]) -> bool:
    return bool({"epochs", "max_samples", "max_steps"} & fields.keys())


# -- a task to start from ------------------------------------------------------------------------


class Points(vcasgd.Task):
    """Classify noisy points of ten overlapping classes with a small network."""

    batch_size = 64
    features, classes, samples = 32, 10, 4096

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(self.features, 64), nn.ReLU(), nn.Linear(64, self.classes))

    def dataset(self, split: str) -> Dataset[Any]:
        first = torch.Generator().manual_seed(1)
        teacher = nn.Sequential(nn.Linear(self.features, 32), nn.Tanh(), nn.Linear(32, 10))
        with torch.no_grad():
            for parameter in teacher.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=first) * 0.6)
            own = torch.Generator().manual_seed(2 if split == "train" else 3)
            points = torch.randn(self.samples, self.features, generator=own)
            noise = torch.randn(self.samples, 10, generator=own)
            labels = (teacher(points) + noise).argmax(1)
        return TensorDataset(points, labels)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.AdamW(parameters, lr=3e-3)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        points, labels = batch
        return F.cross_entropy(model(points), labels)

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        points, labels = batch
        answers = model(points)
        return {
            "loss": F.cross_entropy(answers, labels, reduction="sum"),
            "accuracy": (answers.argmax(1) == labels).sum(),
            "count": torch.tensor(len(labels)),
        }

    def collate(self, samples: list[Any]) -> Any:
        return default_collate(samples)

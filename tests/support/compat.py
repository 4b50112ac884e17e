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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from vcasgd.learning.layout import Layout, TensorKind
from vcasgd.learning.subtasks import EpochPlan
from vcasgd.session.script import load
from vcasgd.simulation.job import Conditions, Simulation
from vcasgd.spec.job import JobSpec
from vcasgd.store.ledger.job import JobRecord, JobState, ModelFacts
from vcasgd.worker.learner import Learner

#: Seeds of the models and orders.
SEEDS = (0, 1)
#: Largest difference from the twin: relative for a loss, absolute for an accuracy; and as a
#: multiple of the twin's standard deviation over the seeds.
WITHIN, OF_NOISE = 0.01, 1.5
#: Seconds for a job of real workers on a busy machine.
JOB_SECONDS = 240

Metrics = dict[str, float]


def extended(*values: Any) -> list[Any]:
    """Return parameters of a test that need ``--extended``."""
    return [pytest.param(each, marks=pytest.mark.extended) for each in values]


def long(*values: Any) -> list[Any]:
    """Return parameters of a test that continuous integration runs."""
    return [pytest.param(each, marks=pytest.mark.ci) for each in values]


#: The grid of a case: ``@grid`` runs a test ``(workers: int)`` with 4 workers, and with
#: ``--extended`` with 1 and 8.
grid = pytest.mark.parametrize("workers", [4, *extended(1, 8)])


def assert_as_plain(
    make_task: Callable[[], vcasgd.Task],
    workers: int,
    epochs: int = 4,
    *,
    twin: Callable[[], vcasgd.Task] | None = None,
    loop: Callable[..., Metrics] | None = None,
    seeds: Sequence[int] = SEEDS,
    **fields: Any,
) -> None:
    """Fail if jobs of so many workers end with a worse loss than plain loops.

    ``twin`` makes the task of the plain loops, ``make_task`` by default, and ``loop`` is one of
    :func:`plain`. ``fields`` are more fields of the job.
    """
    expected = [plain((twin or make_task)(), epochs, seed, loop)["loss"] for seed in seeds]
    ends = [simulated(make_task, workers, seed, epochs=epochs, **fields) for seed in seeds]
    assert_close([each["loss"] for each in ends], expected)


def assert_close(ends: Sequence[float], plain_ends: Sequence[float], metric: str = "loss") -> None:
    """Fail if the ends of jobs are worse than those of their twins, one for each seed."""
    expected, mean = statistics.mean(plain_ends), statistics.mean(ends)
    noise = statistics.stdev(plain_ends) if len(plain_ends) > 1 else 0.0
    most = max(WITHIN if metric == "accuracy" else WITHIN * abs(expected), OF_NOISE * noise)
    worse = expected - mean if metric == "accuracy" else mean - expected
    assert worse <= most, f"{metric} {ends} instead of {plain_ends}, ±{most:.4f}"


# -- twins -----------------------------------------------------------------------------------------


def plain(
    task: vcasgd.Task, epochs: int, seed: int, loop: Callable[..., Metrics] | None = None
) -> Metrics:
    """Train a task as an ordinary script does, and return its metrics.

    ``loop`` has the arguments of :func:`train_plainly`, which is the default.
    """
    torch.manual_seed(seed)
    model = task.model()
    optimizer = task.optimizer([each for each in model.parameters() if each.requires_grad])
    return (loop or train_plainly)(task, model, optimizer, epochs, seed)


def train_plainly(
    task: vcasgd.Task,
    model: nn.Module,
    optimizer: Optimizer,
    epochs: int,
    seed: int,
    *,
    before_step: Callable[[], object] = lambda: None,
    after_step: Callable[[int], object] = lambda _: None,
) -> Metrics:
    """Train a model with its optimizer, and return its metrics.

    ``before_step`` may change gradients; ``after_step`` gets the number of steps.
    """
    rates = [(group, group["lr"]) for group in optimizer.param_groups]
    data, done, last = task.dataset("train"), 0, 1.0
    total = epochs * len(data)
    batches = orders(len(data), epochs, seed, task.batch_size)
    for step, indices in enumerate(batches, 1):
        factor = task.schedule(done / total)
        # Without a schedule, the rates are those of the caller.
        if factor != last:
            for group, rate in rates:
                group["lr"] = rate * factor
        last = factor
        optimizer.zero_grad()
        loss = task.loss(model, task.collate([data[index] for index in indices]))
        loss.backward()
        if task.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), task.clip_norm)
        before_step()
        optimizer.step()
        done += len(indices)
        after_step(step)
    return evaluate_plainly(task, model)


def orders(samples: int, epochs: int, seed: int, size: int) -> Iterable[list[int]]:
    """Yield the samples of each batch, in the order of a job with this seed."""
    plan = EpochPlan(samples, 1, epochs, seed)
    for epoch in range(epochs):
        indices = plan.indices(epoch, 0, samples).tolist()
        for start, stop in pairwise([*range(0, samples, size), samples]):
            yield indices[start:stop]


class EpochBatches:
    """The batches of a job's order: those of another epoch each time."""

    def __init__(self, epochs: int, seed: int) -> None:
        self._batches = list(orders(Points.samples, epochs, seed, Points.batch_size))
        self._length, self._epoch = len(self._batches) // epochs, 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[list[int]]:
        first, self._epoch = self._epoch * self._length, self._epoch + 1
        return iter(self._batches[first : first + self._length])


@torch.no_grad()
def evaluate_plainly(task: vcasgd.Task, model: nn.Module) -> Metrics:
    """Return the means of a task's metrics over its validation data."""
    model.eval()
    data, sums = task.dataset("validation"), defaultdict[str, float](float)
    data = data if hasattr(data, "__len__") else list(data)
    size = len(data)
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
#: The start of a script: the parts of a task, by the names that loops use.
HEAD = """
import copy
import torch
import vcasgd
from torch.utils.data import DataLoader, Dataset
from {module} import {task}
{before}
task = {task}()
model, data = task.model(), task.dataset("train")
optimizer = {optimizer}
session = vcasgd.Session(model, {session})
{evaluation}
"""
#: The loop of a session that makes the steps.
SESSION_STEPS = """
for batch in session.batches(data, batch_size=task.batch_size):
    session.step(task.loss(model, batch))
"""
EVALUATION = 'session.evaluation(task.dataset("validation"))(task.evaluate)'


def own_steps(loader: str = "data, batch_size=task.batch_size", changes: str = "pass") -> str:
    """Return a loop that makes its steps itself, of a loader; each ``changes`` gradients."""
    return f"""
for batch in session.loader({loader}):
    optimizer.zero_grad()
    task.loss(model, batch).backward()
    {changes}
    optimizer.step()
"""


def loop_script(
    folder: Path,
    loop: str,
    task: type[vcasgd.Task] | None = None,
    *,
    before: str = "",
    optimizer: str = "task.optimizer(model.parameters())",
    session: str = "optimizer",
    evaluation: str = EVALUATION,
    name: str = "train.py",
) -> Callable[[], vcasgd.Task]:
    """Write a script with a loop over a task's data; return what :func:`script` returns.

    ``task`` is a class of a module, :class:`Points` by default. ``before`` is code above the
    first part, and ``session`` has the session's arguments behind the model.
    """
    kind = task or Points
    head = HEAD.format(
        module=kind.__module__,
        task=kind.__name__,
        before=inspect.cleandoc(before),
        optimizer=optimizer,
        session=session,
        evaluation=evaluation,
    )
    return script(head + loop, folder, name)


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


def ends_of(
    task: Callable[[], vcasgd.Task], workers: int, *, epochs: int, **fields: Any
) -> list[float]:
    """Return the losses at the ends of jobs of simulated workers, one for each seed."""
    return [simulated(task, workers, seed, epochs=epochs, **fields)["loss"] for seed in SEEDS]


def facts_of(task: vcasgd.Task, workers: int = 4, **fields: Any) -> ModelFacts:
    """Return what the first worker of a job finds out about its model."""
    return learner_of(task, workers, **fields).facts(1)


def kinds_of(facts: ModelFacts) -> dict[str, TensorKind]:
    """Return how versions merge each tensor of a model."""
    return {entry.name: entry.kind for entry in Layout.from_json(facts.layout).entries}


def learner_of(task: vcasgd.Task, workers: int = 4, **fields: Any) -> Learner:
    """Return the learner of a worker."""
    job = {"name": "j", "task": "t:T", "epochs": 1, "workers": {"max": workers}, **fields}
    return Learner(JobSpec.parse(job), task, "cpu")


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


class FewPoints(Points):
    samples = 1024


class ByLoss(Points):
    """Points whose models are evaluated by the loss of a task, and by what they keep."""

    def kept(self, model: Any) -> dict[str, Tensor]:
        """Return more values of a model, by their names."""
        return {}

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        count = torch.tensor(len(batch[0]))
        values = {"loss": self.loss(model, batch), **self.kept(model)}
        return {"count": count, **{name: value * count for name, value in values.items()}}

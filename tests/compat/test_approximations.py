"""Events of what several workers do otherwise than one process, each with its remedy."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from compat.test_batches import LargeNormalized, Normalized
from compat.test_buffers import Queued
from support.compat import (
    FewPoints,
    Points,
    facts_of,
    loop_script,
    on_workers,
    own_steps,
    simulated,
)
from support.harness import Harness
from torch import Tensor, nn
from torch.optim import Optimizer

from vcasgd.learning.layout import Layout
from vcasgd.store.ledger.job import JobState
from vcasgd.task.task import Task
from vcasgd.worker.approximations import own_values

pytestmark = pytest.mark.usefixtures("one_thread")


class Momentum(Points):
    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class WithoutMomentum(Points):
    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)


class Scaled(Points):
    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.RMSprop(parameters, lr=0.01)


class Clipping(Points):
    clip_norm = 1.0


class ShortParts(Queued):
    min_local_batch = 2


class Warming(Points):
    """A loss whose weight follows a count of the task's own."""

    steps = 0

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.steps += 1
        return super().loss(model, batch) * min(1.0, 0.9 + self.steps / 100)


class Bucketed(WithoutMomentum):
    """Batches of a sampler of their own."""

    def sampler(self, dataset: Any) -> Any:
        return [list(range(start, start + 64)) for start in range(0, len(dataset), 64)]


class Hooked(Points):
    def model(self) -> nn.Module:
        model = super().model()
        for each in model.parameters():
            each.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return model


def clamp(optimizer: Optimizer, _args: Any, _options: Any) -> None:
    for group in optimizer.param_groups:
        for each in group["params"]:
            each.grad.clamp_(-0.01, 0.01)


class HookedStep(Points):
    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.5)
        optimizer.register_step_pre_hook(clamp)
        return optimizer


class HookedOutput(Points):
    def model(self) -> nn.Module:
        model = super().model()
        assert isinstance(model, nn.Sequential)
        model[0].register_full_backward_hook(lambda _layer, inputs, _outputs: inputs)
        return model


class HookedAccumulated(Hooked):
    batches_per_step = 4


class HookedLater(Points):
    def model(self) -> nn.Module:
        model = super().model()
        for each in model.parameters():
            each.register_post_accumulate_grad_hook(lambda _parameter: None)
        return model


HALF = {"update": {"rule": "rounds", "codec": "bfloat16"}}


@pytest.mark.parametrize(
    ("task", "fields", "kinds"),
    [
        (Points, {}, []),
        (WithoutMomentum, {}, []),
        (Momentum, {}, ["momentum-starts-again"]),
        (Momentum, {"workers": 1}, []),
        (Scaled, {}, ["state-starts-again"]),
        (Clipping, {}, []),
        (Clipping, HALF, ["clip-approximated"]),
        (Queued, {}, []),
        (LargeNormalized, {}, ["norm-of-parts"]),
        (Normalized, {}, []),
        (LargeNormalized, {"batch": "worker"}, []),
        (Warming, {}, ["own-values"]),
        (ShortParts, {}, ["buffers-averaged"]),
        (Queued, {"batch": "worker"}, ["buffers-averaged"]),
        (Bucketed, {}, ["batches-mixed"]),
        (Bucketed, {"batch": "worker"}, []),
        (Hooked, {}, []),
        (Hooked, HALF, ["loop-clips"]),
        (HookedStep, {}, []),
        (HookedStep, HALF, ["loop-clips"]),
        (HookedOutput, {}, ["loop-clips"]),
        (HookedAccumulated, {}, ["loop-clips"]),
        (HookedLater, {}, ["loop-clips"]),
    ],
)
def test_what_is_approximated_is_noted(
    task: type[Points], fields: dict[str, Any], kinds: list[str]
) -> None:
    assert list(facts_of(task(), **fields).notes) == kinds


def changing_loop(folder: Path, changes: str, **options: Any) -> Callable[[], Task]:
    """Return the task of a loop that changes gradients before each step."""
    return loop_script(folder, own_steps(changes=changes), **options)


HELPERS = """
kept = {}


def clamped(model):
    for each in model.parameters():
        each.grad.clamp_(-0.1, 0.1)


def smoothed(model):
    for each in model.parameters():
        kept[each] = 0.9 * kept.get(each, 0) + each.grad
        each.grad = kept[each]


norms = list(map(
    lambda of: of, [lambda model: [each.grad.norm() for each in model.parameters()]]))[0]
"""
CLIPS = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"


@pytest.mark.parametrize(
    ("changes", "fields", "words"),
    [
        (CLIPS, {}, None),
        (CLIPS, HALF, "the loop clips the gradient of a worker's part"),
        ("model[0].bias.grad.clamp_(-0.1, 0.1)", {}, None),
        ("clamped(model)", {}, None),
        ("model[0].bias.grad.clamp_(-len(batch), 0.1)", {}, "hooks or the loop"),
        ("smoothed(model)", {}, "hooks or the loop"),
        ("norms(model); smoothed(model)", {}, "hooks or the loop"),
        ("model[0].bias.grad = None", {}, None),
        ("torch.autograd.grad(model(batch[0]).sum(), model[0].weight)", {}, None),
        ("[p.grad.zero_() for p in model.parameters() if p.grad is not None]", {}, None),
        ("g = [p.grad for p in model.parameters() if p.grad is not None]", {}, "hooks or the loop"),
    ],
)
def test_a_loop_that_changes_gradients_is_noted(
    tmp_path: Path, changes: str, fields: dict[str, Any], words: str | None
) -> None:
    (tmp_path / "gradient_helpers.py").write_text(HELPERS)
    before = "from gradient_helpers import clamped, norms, smoothed"

    notes = facts_of(changing_loop(tmp_path, changes, before=before)(), **fields).notes

    assert list(notes) == (["loop-clips"] if words else [])
    assert (words or "") in notes.get("loop-clips", "")


@pytest.mark.parametrize(
    ("before", "changes", "clips"),
    [
        ("from torch.nn.utils import clip_grad_norm_  # for clip_grad_norm_()", "pass", False),
        ("from torch.nn.utils import clip_grad_norm_ as clip", "clip([model[0].bias], 1)", True),
        ("clip = torch.nn.utils.clip_grad_norm_", "clip([model[0].bias], 1)", True),
    ],
)
def test_a_loop_that_clips_is_known_by_what_it_uses(
    tmp_path: Path, before: str, changes: str, clips: bool
) -> None:
    # Given a loop that makes no step before the training
    session = "optimizer, min_local_batch=2"
    task = changing_loop(tmp_path, changes, before=before, session=session)()

    assert Layout.from_json(facts_of(task).layout).gradients is clips


OWN_DATA = """
class Resampled(Dataset):
    def __init__(self):
        self.set_epoch = self.resample = lambda *_: None

    def __len__(self):
        return len(data)

    def __getitem__(self, index):
        return data[index]


resampled = Resampled()
loader = session.loader(DataLoader(resampled, 64, shuffle=True))
for epoch in range(2):
    {call}
    for batch in loader:
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("call", "noted"),
    [
        ("resampled.resample()", True),
        ("loader.dataset.resample()", True),
        ("resampled.set_epoch(epoch)", False),
        ("size = resampled.__len__()", False),
        ("model.train()", False),
    ],
)
def test_a_loop_that_changes_its_data_is_noted(tmp_path: Path, call: str, noted: bool) -> None:
    notes = facts_of(loop_script(tmp_path, OWN_DATA.format(call=call))()).notes

    assert list(notes) == (["own-data"] if noted else [])
    assert call in notes.get("own-data", call)


TRAINER = """
class Trainer:
    def __init__(self, loss, optimizer):
        self.loss, self.optimizer, self.norms = loss, optimizer, 0

    def change(self, model):
        for each in model.parameters():
            {change}

    def fit(self, model, loader):
        for batch in loader:
            self.optimizer.zero_grad()
            self.loss(model, batch).backward()
            self.change(model)
            self.optimizer.step()
"""


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        ("each.grad.clamp_(-0.1, 0.1)", []),
        ("self.norms += each.grad.norm(); each.grad /= self.norms", ["loop-clips"]),
    ],
)
def test_a_loop_of_another_file_is_read(tmp_path: Path, change: str, kinds: list[str]) -> None:
    (tmp_path / "trainer_of_test.py").write_text(TRAINER.format(change=change))
    fits = "Trainer(task.loss, optimizer).fit(model, session.loader(data, batch_size=64))"
    task = loop_script(tmp_path, fits, before="from trainer_of_test import Trainer")()

    notes = facts_of(task).notes

    assert [each for each in notes if each == "loop-clips"] == kinds
    assert task.clips_itself == (not kinds)


@pytest.mark.parametrize("clip", ["clip_grad_norm_", "clip_grad_value_"])
def test_a_loop_clips_parts_at_a_larger_norm(tmp_path: Path, clip: str) -> None:
    # Given a loop that clips nearly each gradient of 4 workers, and notes the largest number
    file, order = tmp_path / "largest", "torch.inf" if "value" in clip else "2"
    norm = f"torch.nn.utils.get_total_norm([each.grad for each in model.parameters()], {order})"
    note = f"with open({str(file)!r}, 'a') as out: print(float({norm}), file=out)"
    changes = f"torch.nn.utils.{clip}(model.parameters(), 0.001)\n    {note}"
    task = changing_loop(tmp_path, changes, task=FewPoints)

    simulated(task, 4, epochs=1)

    noted = [float(each) for each in file.read_text().split()]
    assert statistics.median(noted) == pytest.approx(0.002, rel=0.01)


SIGNS = """
class Signs(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                each.data.sub_(group["lr"] * each.grad.sign())
"""


def test_an_optimizer_of_a_script_changes_no_gradient(tmp_path: Path) -> None:
    signs = "Signs(model.parameters(), lr=1e-3)"

    task = loop_script(tmp_path, own_steps(), before=SIGNS, optimizer=signs)()

    assert "loop-clips" not in facts_of(task).notes


LOOP = """
class Tracker:
    def update(self, batch):
        self.seen = self.seen + len(batch)

    def weight(self):
        return 1 / self.seen


tracker = Tracker()
for epoch in range(3):
    for number, batch in enumerate(loader):
        {before}
        loss = task.loss(model, batch) * weight
        loss.backward()
        optimizer.step()
        {after}
    print(epoch + 1)
"""


@pytest.mark.parametrize(
    ("before", "after", "names"),
    [
        ("weight = min(1, steps / 50)", "steps += 1", ["steps"]),
        ("weight = 1 - mean", "mean = 0.9 * mean + 0.1 * loss.item()", ["mean"]),
        ("weight = 1", "model.tau = model.tau * 0.99", []),
        ("weight = model.tau", "model.tau = model.tau * 0.99", ["model.tau"]),
        ("weight = 1", "total += loss.item(); print(total)", []),
        ("weight = 1", "if total > 5: print(total); total = 0\n        total += 1", []),
        ("weight = 1 + number % 2", "if epoch == 1: thaw()", ["epoch", "number"]),
        ("weight = 1", "if number % 10 == 0: print(epoch + number)", []),
        ("weight = 1; batch = 0.5 * batch + 0.5 * batch.flip(0)", "print(batch)", []),
        ("weight = session.epoch", "losses.append(loss.item())", []),
        ("weight = mean(losses[-5:])", "losses.append(loss.item())", ["losses"]),
        ("weight = 1", "losses.append(loss.item()); all = sum(losses); print(all)", []),
        ("part = model(batch); part += 1; weight = part", "pass", []),
        ("with autocast(): out, part = model(batch)\n        weight = part", "part = part / 2", []),
        ("part += model(batch); weight = part", "part = 0 * part", ["part"]),
        ("if epoch: part = model(batch)\n        part += 1; weight = part", "pass", ["part"]),
        ("weight = tracker.weight()", "tracker.update(batch)", ["tracker.seen"]),
        ("weight = 1", "tracker.update(batch); print(tracker.seen)", []),
        (
            "weight = 1\n        if session.starts_sequence: state = 0",
            "state = state + model(state)",
            [],
        ),
    ],
)
def test_values_that_a_loop_carries_from_batch_to_batch(
    before: str, after: str, names: list[str]
) -> None:
    assert own_values([LOOP.format(before=before, after=after)]) == names


#: A loop before the one that trains the job, as for a first layer.
BEFORE = """
warm = 0
for batch in DataLoader(data, 64):
    warm = 0.9 * warm + 0.1
    (task.loss(model, batch) * warm).backward()
    optimizer.zero_grad()
"""


COUNTING = """
class Trainer:
    def __init__(self):
        self.steps = 0

    def fit(self, loader):
        for batch in loader:
            loss = self.step(batch)
            loss.backward()
            self.steps += 1
            if self.steps % 20 == 0:
                message = "step {{}}".format(self.steps)
                logger.info(message)
                self.losses = []

    def {other}
"""


@pytest.mark.parametrize(
    ("other", "names"),
    [
        ("save(self): torch.save(self.model, 'model.pt')", []),
        ("step(self, batch): return self.model(batch) * self.steps", ["self.steps"]),
    ],
)
def test_a_count_that_is_only_reported_is_no_value(other: str, names: list[str]) -> None:
    assert own_values([COUNTING.format(other=other)]) == names


def test_values_of_loops_over_other_data_are_none_of_the_job(tmp_path: Path) -> None:
    task = loop_script(tmp_path, BEFORE + own_steps("data, 64"), FewPoints)()

    assert "own-values" not in facts_of(task).notes


COUNTS = """
steps = 0
for batch in session.batches(data, batch_size=64):
    if session.global_step == 0:
        Path({file!r}).write_text(str(steps))
    steps += 1
    session.step(task.loss(model, batch) * min(1.0, steps / 10))
"""


@pytest.mark.ci
def test_a_loop_does_not_count_batches_that_are_only_compared(
    harness: Harness, tmp_path: Path
) -> None:
    file = tmp_path / "counted"
    loop_script(tmp_path, COUNTS.format(file=str(file)), before="from pathlib import Path")

    _, job = on_workers(harness, tmp_path, "train.py", 2, epochs=1)

    assert job.state is JobState.SUCCEEDED, job.reason
    (event,) = harness.events(job.id, "own-values")
    assert event["text"].startswith("each worker has its own steps, ")
    # The job's first batch, in one part or two, but none of those before.
    assert int(file.read_text()) <= 1


def test_tensors_that_travel_are_no_values_of_a_worker() -> None:
    source = """
    class Module:
        def forward(self, x):
            self.counts += x.sum()
            return x / self.counts
    """
    assert own_values([source]) == ["self.counts"]
    assert own_values([source], {"counts"}) == []


#: A loop whose layers, or whose hook of what one returns, change gradients.
CHANGES_BACKWARD = """
class Changed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        {changed}


for batch in session.loader(data, 64):
    optimizer.zero_grad()
    hidden = model[1](model[0](batch[0]))
    {hidden}
    torch.nn.functional.cross_entropy(model[2](hidden), batch[1]).backward()
    optimizer.step()
"""
USED = "hidden = Changed.apply(hidden)"
#: Continues the class with another signature.
OTHER = "pass\n\n    @staticmethod\n    def backward(*given):\n        "


@pytest.mark.parametrize(
    ("changed", "hidden", "noted"),
    [
        ("length = gradient.norm(); return gradient / length", USED, True),
        ("return gradient.clamp(-0.01, 0.01)", USED, True),
        (f"{OTHER}return given[1] / given[1].norm()", USED, True),
        ("return torch.where(gradient.abs() > 0.01, 0, gradient)", USED, True),
        ("return None if gradient is None else -0.5 * gradient", USED, False),
        ("return gradient.clamp(-0.01, 0.01)", "pass", False),
        ("return gradient", "hidden.register_hook(lambda g: g / g.norm())", True),
    ],
)
def test_gradients_that_are_changed_inside_of_the_model_are_noted(
    tmp_path: Path, changed: str, hidden: str, *, noted: bool
) -> None:
    loop = CHANGES_BACKWARD.format(changed=changed, hidden=hidden)

    assert ("loop-clips" in facts_of(loop_script(tmp_path, loop, FewPoints)()).notes) == noted

"""State beside the model: averages of its parameters end as in a plain loop."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from compat.test_batches import LargeNormalized
from support.compat import (
    FewPoints,
    Metrics,
    Points,
    assert_as_plain,
    evaluate_plainly,
    facts_of,
    grid,
    kinds_of,
    long,
    loop_script,
    on_workers,
    plain,
    script,
    simulated,
    train_plainly,
)
from support.harness import Harness
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset, TensorDataset

from vcasgd.errors import SpecError
from vcasgd.learning.beside import Beside
from vcasgd.learning.layout import Layout, TensorKind
from vcasgd.store.ledger.job import JobState

pytestmark = pytest.mark.usefixtures("one_thread")
DECAY = 0.98


class Averaged(Points):
    """A task whose rate is so high that the average is better than the model."""

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def averaged(task: Averaged, model: nn.Module, *others: Any) -> Metrics:
    """Train in a plain loop that averages after each step, and evaluate the average."""
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    average.update_parameters(model)
    train_plainly(task, model, *others, after_step=lambda _: average.update_parameters(model))
    return evaluate_plainly(task, average.module)


@grid
def test_the_average_is_that_of_a_plain_loop(workers: int) -> None:
    ema = {"decay": DECAY, "evaluate": "instead"}

    assert_as_plain(Averaged, workers, 2, loop=averaged, ema=ema)


def test_a_worker_that_is_alone_publishes_often_enough(harness: Harness, tmp_path: Path) -> None:
    script(f"from {__name__} import Averaged", tmp_path)

    metrics, job = on_workers(harness, tmp_path, "train:Averaged", 1, epochs=2, ema=DECAY)

    assert job.state is JobState.SUCCEEDED, job.reason
    assert metrics["ema_loss"] == pytest.approx(plain(Averaged(), 2, 0, averaged)["loss"], rel=0.01)


def test_the_average_is_measured_beside_the_model() -> None:
    means = simulated(Averaged, 2, epochs=2, ema=DECAY)

    assert means["ema_loss"] < means["loss"]
    assert simulated(Averaged, 2, epochs=2)["loss"] == means["loss"]


# --- averages of a script or a task ---------------------------------------------------------------

LOOPS = {
    "module": """
average = copy.deepcopy(model)


@session.evaluation(task.dataset("validation"))
def judge(model, batch):
    return task.evaluate(average, batch)


for batch in session.batches(data, batch_size=64):
    session.step(task.loss(model, batch))
    with torch.no_grad():
        for mean, each in zip(average.parameters(), model.parameters()):
            mean.mul_(0.98).add_(each, alpha=0.02)
""",
    "swa_utils": """
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98))


@session.evaluation(task.dataset("validation"))
def judge(model, batch):
    return task.evaluate(average, batch)


for batch in session.batches(data, batch_size=64):
    session.step(task.loss(model, batch))
    average.update_parameters(model)
""",
    "dict in a function": """
class Ema:
    def __init__(self, model):
        self.shadow = {name: each.detach().clone() for name, each in model.named_parameters()}

    def update(self, model):
        for name, each in model.named_parameters():
            self.shadow[name] = 0.98 * self.shadow[name] + 0.02 * each.detach()


def main():
    ema = Ema(model)

    @session.evaluation(task.dataset("validation"))
    def judge(model, batch):
        own = copy.deepcopy(model)
        own.load_state_dict(ema.shadow)
        return task.evaluate(own, batch)

    for batch in session.loader(data, batch_size=64):
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
        ema.update(model)


main()
""",
}


@pytest.mark.parametrize("loop", LOOPS)
@grid
@pytest.mark.ci
def test_an_average_of_a_script_is_evaluated(tmp_path: Path, loop: str, workers: int) -> None:
    task = loop_script(tmp_path, LOOPS[loop], Averaged, evaluation="")

    # As in all cases, because one end is as much as 1.4 % above its twin with 8 workers.
    assert_as_plain(task, workers, 2, twin=Averaged, loop=averaged)


class Copied(Averaged):
    """A task with a frozen copy inside its model that each step moves, as a mean teacher."""

    def model(self) -> nn.Module:
        model = nn.ModuleDict({"student": super().model()})
        model["teacher"] = copy.deepcopy(model["student"]).requires_grad_(False)
        self.net = model
        return model

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if self.steps:
            with torch.no_grad():
                networks = model["teacher"].parameters(), model["student"].parameters()
                pairs = zip(*networks, strict=True)
                for mean, each in pairs:
                    mean.mul_(DECAY).add_(each, alpha=1 - DECAY)
        self.steps = True
        return super().loss(model["student"], batch)

    steps = False

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return super().evaluate(model["teacher"], batch)


@grid
@pytest.mark.ci
def test_a_frozen_copy_that_training_moves_travels(workers: int) -> None:
    assert_as_plain(Copied, workers, 2)


# --- other tensors -------------------------------------------------------------------------------


class Remembering(Points):
    """A task that keeps its last answers for each sample, and pulls the next ones to them."""

    samples = 2048

    def __init__(self) -> None:
        self.answers = torch.zeros(self.samples, self.classes)
        self.last_norm = torch.zeros(())

    def dataset(self, split: str) -> Dataset[Any]:
        return TensorDataset(*super().dataset(split).tensors, torch.arange(self.samples))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        points, labels, numbers = batch
        logits = model(points)
        with torch.no_grad():
            self.last_norm = logits.norm()
            self.answers[numbers] = 0.7 * self.answers[numbers] + 0.3 * logits.softmax(1)
        pull = (1 - (self.answers[numbers] * logits.softmax(1)).sum(1)).log().mean()
        return F.cross_entropy(logits, labels) + 3 * pull

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return super().evaluate(model, batch[:2])


class Decaying(Points):
    """A task with a sum over its batches that decays."""

    def __init__(self) -> None:
        self.seen = torch.zeros(self.classes)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.seen = 0.9 * self.seen + torch.bincount(batch[1], minlength=self.classes)
        return super().loss(model, batch)


@grid
@pytest.mark.ci
def test_what_is_kept_for_each_sample_has_the_changes_of_all(workers: int) -> None:
    assert_as_plain(Remembering, workers)


@pytest.mark.parametrize(
    ("task", "kind", "least"),
    [(Remembering, TensorKind.SUM, 2), (Decaying, TensorKind.STATISTIC, 64)],
)
def test_how_versions_merge_tensors_beside_the_model(
    task: type[Points], kind: TensorKind, least: int
) -> None:
    facts = facts_of(task())

    kinds = kinds_of(facts)
    assert kinds["beside:answers" if task is Remembering else "beside:seen"] is kind
    # What each step replaces, such as the last norm, is no state.
    assert facts.min_local_batch == least
    assert least == 2 or "change seen" in facts.min_local_batch_why


NAMES = [f"kept_{number:02}" for number in range(20)]


class Scaled(nn.Module):
    """A network that normalizes its inputs with statistics that are plain attributes."""

    def __init__(self, network: nn.Module, features: int) -> None:
        super().__init__()
        self.network = network
        self.mean, self.square = torch.zeros(features), torch.ones(features)
        self.last = {"points": torch.zeros(64, features), "hidden": torch.zeros(64, 64)}

    def forward(self, points: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.98 * self.mean + 0.02 * points.mean(0)
            self.square = 0.98 * self.square + 0.02 * points.square().mean(0)
        deviation = (self.square - self.mean**2).clamp(min=1e-3).sqrt()
        self.last = {"points": points, "hidden": self.network[0](points)}
        return self.network((points - self.mean) / deviation)


class PlainAttributes(Points):
    """A task whose model keeps tensors in plain attributes, which aren't in its state dict."""

    def model(self) -> nn.Module:
        return Scaled(super().model(), self.features)

    def dataset(self, split: str) -> Dataset[Any]:
        points, labels = super().dataset(split).tensors
        return TensorDataset(3 * points + 5, labels)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.mark.ci
@grid
def test_tensors_in_plain_attributes_of_a_module_travel(workers: int) -> None:
    assert_as_plain(PlainAttributes, workers)


def test_plain_attributes_have_the_order_of_the_code() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in reversed(NAMES):
                setattr(self, name, torch.zeros(1))

    found = Beside({}, Keeps()).tensors()

    # It is the order of the vector, and sets have another one in each process
    assert list(found) == [f"beside:{name}" for name in reversed(NAMES)]


class Measures(Points):
    """A task that keeps its least loss, and whose model has a metric."""

    def __init__(self) -> None:
        self.least = torch.tensor(torch.inf)

    def model(self) -> nn.Module:
        metric = pytest.importorskip("torchmetrics").PearsonCorrCoef()
        return nn.ModuleDict({"network": super().model(), "metric": metric})

    def loss(self, model: Any, batch: Any) -> Tensor:
        answers = model["network"](batch[0])
        model["metric"](answers[:, 0].detach(), batch[1].float())
        loss = F.cross_entropy(answers, batch[1])
        self.least = torch.minimum(self.least, loss.detach())
        return loss


def test_what_a_worker_only_measures_does_not_travel() -> None:
    facts = facts_of(Measures())

    assert Layout.from_json(facts.layout).beside == []
    assert facts.min_local_batch == 2


#: A script that has looked at its data and tried its model before it trains.
LOOKS = """
points, labels = next(iter(DataLoader(data, {size})))
answers = model(points)
batches = session.loader(data, {size}, gradient_accumulation_steps=64 // {size})
for points, labels in batches:
    answers = model(points)
    (torch.nn.functional.cross_entropy(answers, labels) * {size} / 64).backward()
    if batches.ends_step:
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(("workers", "size"), [(1, 64), (2, 64), (2, 16)])
def test_what_a_script_keeps_of_a_batch_is_no_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, size: int
) -> None:
    monkeypatch.setattr(FewPoints, "samples", 1000)
    task = loop_script(tmp_path, LOOKS.format(size=size), FewPoints)

    assert Layout.from_json(facts_of(task(), workers).layout).beside == []
    assert simulated(task, workers, epochs=1)["loss"] < 3


#: A loop whose state has as many rows as a batch.
CENTRES = """
centres = torch.zeros(64)
for points, labels in session.loader(data, 64):
    assert len(points) in ({sizes})
    optimizer.zero_grad()
    answers = model(points)
    torch.nn.functional.cross_entropy(answers, labels).backward()
    optimizer.step()
    centres.lerp_(answers.detach().mean().expand(64), 0.1)
"""


@pytest.mark.parametrize(("samples", "workers", "sizes"), [(256, 1, "64,"), (20, 2, "10, 20")])
def test_a_batch_that_a_job_does_not_have_is_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samples: int, workers: int, sizes: str
) -> None:
    monkeypatch.setattr(FewPoints, "samples", samples)
    task = loop_script(tmp_path, CENTRES.format(sizes=sizes), FewPoints)

    assert Layout.from_json(facts_of(task(), workers).layout).beside == ["centres"]


#: A loop with an average of a model, whose normalization has constant parameters at first.
AVERAGES = """
average = copy.deepcopy(model)
for batch in session.loader(data, 64):
    optimizer.zero_grad()
    task.loss(model, batch).backward()
    optimizer.step()
    with torch.no_grad():
        for mine, its in zip(average.parameters(), model.parameters()):
            mine.lerp_(its, 0.05)
"""


def test_constant_parameters_of_a_copy_are_copies(tmp_path: Path) -> None:
    facts = facts_of(loop_script(tmp_path, AVERAGES, LargeNormalized)())

    assert facts.min_local_batch == 16
    assert kinds_of(facts)["beside:average.1.bias"] is TensorKind.STATISTIC


#: A loop that keeps the best weights of its own validation, as many tutorials do.
BEST = """
best, least = copy.deepcopy(model.state_dict()), float("inf")
for epoch in range(2):
    for batch in session.loader(data, 64):
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
    with torch.no_grad():
        loss = float(task.loss(model, task.dataset("validation").tensors))
    if loss < least:
        least, best = loss, {weights}
    {used}
model.load_state_dict(best)
torch.save(best, "best.pt")
"""


@pytest.mark.parametrize(
    ("weights", "used", "travels"),
    [
        ("copy.deepcopy(model.state_dict())", "pass", False),
        ("{name: each.clone() for name, each in model.state_dict().items()}", "pass", False),
        ("copy.deepcopy(model.state_dict())", "best['0.bias'] = 0.9 * best['0.bias']", True),
        ("{name: (best[name] + each) / 2 for name, each in model.state_dict().items()}", "", True),
    ],
)
def test_weights_that_a_loop_keeps_do_not_travel_but_averages_do(
    tmp_path: Path, weights: str, used: str, *, travels: bool
) -> None:
    loop = BEST.format(weights=weights, used=used)

    facts = facts_of(loop_script(tmp_path, loop, FewPoints)())

    assert Layout.from_json(facts.layout).beside == (["best"] if travels else [])


def test_what_a_module_keeps_of_its_last_batch_is_no_state() -> None:
    facts = facts_of(PlainAttributes())

    kinds = kinds_of(facts)
    assert kinds["beside:mean"] is kinds["beside:square"] is TensorKind.STATISTIC
    assert facts.min_local_batch == 2
    assert facts.notes.keys() == {"momentum-starts-again"}


# --- parameters of the loss, and parameters that thaw ---------------------------------------------


class Centred(Points):
    """A loss with parameters of its own, which the optimizer trains, too."""

    def __init__(self) -> None:
        self.head = nn.Linear(self.classes, self.classes)
        self.temperature = nn.Parameter(torch.tensor(3.0))
        with torch.no_grad():
            self.head.weight.copy_(torch.eye(self.classes).flip(0))
            self.head.bias.zero_()

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        own = [*self.head.parameters(), self.temperature]
        return torch.optim.AdamW([*parameters, *own], lr=3e-3)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(lambda points: self.head(model(points)) * self.temperature.exp(), batch)

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return super().evaluate(lambda x: self.head(model(x)) * self.temperature.exp(), batch)


@grid
@pytest.mark.ci
def test_parameters_of_the_loss_are_in_updates(workers: int) -> None:
    assert_as_plain(Centred, workers, 2)


#: A script that replaces its model after it has made the optimizer.
REPLACED = """
loader = session.loader(data, 64)
for batch in loader:
    optimizer.zero_grad()
    task.loss(model, batch).backward()
    optimizer.step()
"""


def test_an_optimizer_of_other_parameters_is_refused(tmp_path: Path) -> None:
    made = "task.optimizer(model.parameters()); model = copy.deepcopy(model)"
    task = loop_script(tmp_path, REPLACED, FewPoints, optimizer=made)

    with pytest.raises(SpecError, match="the optimizer trains 4 tensors that aren't in the model"):
        facts_of(task())


class Thawed(Points):
    """A task whose first layer is frozen until 30 % of the job."""

    def model(self) -> nn.Module:
        self.net = super().model()
        self.net[0].requires_grad_(False)
        return self.net

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.AdamW(self.net.parameters(), lr=3e-3)

    def schedule(self, progress: float) -> float:
        if progress >= 0.3:
            self.net[0].requires_grad_(True)
        return 1.0


@pytest.mark.ci
@grid
def test_a_layer_that_thaws_is_trained_from_then_on(workers: int) -> None:
    assert_as_plain(Thawed, workers)


def test_what_stays_frozen_does_not_travel() -> None:
    class Frozen(Points):
        def __init__(self) -> None:
            self.teacher = super().model()

        def model(self) -> nn.Module:
            model = super().model()
            model[0].requires_grad_(False)
            return model

    assert [*kinds_of(facts_of(Frozen()))] == ["2.weight", "2.bias"]


@pytest.mark.parametrize("workers", [2, *long(1)])
def test_state_beside_the_model_travels_between_processes(
    harness: Harness, tmp_path: Path, workers: int
) -> None:
    loop_script(tmp_path, LOOPS["dict in a function"], Averaged, evaluation="")

    metrics, job = on_workers(harness, tmp_path, "train.py", workers, epochs=2)

    assert job.state is JobState.SUCCEEDED, job.reason
    assert metrics["loss"] == pytest.approx(plain(Averaged(), 2, 0, averaged)["loss"], rel=0.02)
    assert job.facts is not None
    assert Layout.from_json(job.facts.layout).beside == ["ema"]
    # And several workers are told, the page without a warning for what requires no action
    kinds = ("state-beside", "momentum-starts-again")
    told = [event["text"] for each in kinds for event in harness.events(job.id, each)]
    assert len(told) == (2 if workers > 1 else 0)
    assert {*told} <= {*job.notes}
    assert job.warnings == ()

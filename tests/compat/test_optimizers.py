"""Any optimizer ends as in a plain loop, or what is approximated is said."""

from __future__ import annotations

import pydoc_data.topics
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compat import (
    SESSION_STEPS,
    Metrics,
    Points,
    assert_as_plain,
    evaluate_plainly,
    extended,
    grid,
    long,
    loop_script,
    orders,
    own_steps,
    simulated,
    train_plainly,
)
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import default_collate

from vcasgd.errors import SpecError
from vcasgd.learning.mean_gradients import MeanGradients
from vcasgd.learning.optimizers import Closure, as_optimizer
from vcasgd.task.task import Task, load_task

pytestmark = pytest.mark.usefixtures("one_thread")

TEXT = Path(__file__).parents[2] / "examples" / "text"

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]

#: Optimizers whose state isn't linear in the gradients, so that it shows the noise of a batch.
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "RMSprop": lambda of: torch.optim.RMSprop(of, lr=1e-3),
    "RMSprop, centered": lambda of: torch.optim.RMSprop(of, lr=1e-3, centered=True, momentum=0.5),
    "AMSGrad": lambda of: torch.optim.AdamW(of, lr=3e-3, amsgrad=True),
    "no first moment": lambda of: torch.optim.Adam(of, lr=1e-3, betas=(0.0, 0.99)),
    "Adagrad": lambda of: torch.optim.Adagrad(of, lr=0.03),
    "Adadelta": lambda of: torch.optim.Adadelta(of, lr=1.0),
    "Adafactor": lambda of: torch.optim.Adafactor(of, lr=3e-2),
    "Adamax": lambda of: torch.optim.Adamax(of, lr=3e-3),
    "NAdam": lambda of: torch.optim.NAdam(of, lr=3e-3),
    "RAdam": lambda of: torch.optim.RAdam(of, lr=3e-3),
    "Rprop": lambda of: torch.optim.Rprop(of, lr=1e-4),
    "SGD": lambda of: torch.optim.SGD(of, lr=0.05, momentum=0.9),
    "AdamW": lambda of: torch.optim.AdamW(of, lr=3e-3),
    "own": lambda of: Lamb(of, lr=3e-3),
    "schedule-free": lambda of: ScheduleFree(of, lr=0.3),
    "by hand": lambda of: ByHand(of, lr=3e-3),
    "lazy": lambda of: Lazy(of, lr=5e-2),
    "parts": lambda of: Parts(of, lr=1e-3),
    "inherited": lambda of: Clamped(of, lr=1e-3),
    # A class of its own, because a job patches it, which the next twin can't use.
    "wrapped": lambda of: type("Wrapped", (Lookahead,), {})(torch.optim.RMSprop(of, lr=1e-3)),
}
#: Those that always run.
FEW_OPTIMIZERS = ("inherited", "own")


class Lamb(Optimizer):
    """LAMB (arXiv:1904.00962) with its counter in the group, as a library has it."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            unbias = 1 - 0.9 ** group["step"], 1 - 0.999 ** group["step"]
            for each in group["params"]:
                state = self.state[each]
                if not state:
                    state.update(exp_avg=torch.zeros_like(each), exp_avg_sq=torch.zeros_like(each))
                first = state["exp_avg"].lerp_(each.grad, 0.1)
                second = state["exp_avg_sq"].lerp_(each.grad.square(), 0.001)
                step = first / unbias[0] / (second / unbias[1]).sqrt().add(1e-6)
                ratio = each.norm() / step.norm() if each.norm() > 0 and step.norm() > 0 else 1.0
                each.sub_(step * ratio, alpha=group["lr"])


class Clamped(torch.optim.RMSprop):
    """RMSprop that changes the gradients before the step of its base."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for each in self.param_groups[0]["params"]:
            each.grad.clamp_(-1, 1)
        super().step(closure)


class ByHand(Optimizer):
    """Adam that keeps its state in pairs and in a number, and the first norm in its group."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.owned = self.param_groups[0]["params"]
        self.moments = [(torch.zeros_like(each), torch.zeros_like(each)) for each in self.owned]
        self.made = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.made += 1
        group = self.param_groups[0]
        norm = torch.nn.utils.get_total_norm([each.grad for each in self.owned])
        norm = group.setdefault("norm", norm)
        for each, (first, second) in zip(self.owned, self.moments, strict=True):
            gradient = each.grad / norm
            first.lerp_(gradient, 0.1)
            second.lerp_(gradient.square(), 0.001)
            unbiased = (second / (1 - 0.999**self.made)).sqrt().add_(1e-6)
            each.sub_(first / unbiased, alpha=group["lr"] / (1 - 0.9**self.made))


class Lazy(Optimizer):
    """Normalized gradients with momentum, whose state begins with the first step."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.momentum: list[Tensor] | None = None
        self.norms: list[float] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        owned = self.param_groups[0]["params"]
        if self.momentum is None:
            self.momentum = [torch.zeros_like(each) for each in owned]
            self.first = [each.clone() for each in owned]
        self.norms.append(float(torch.nn.utils.get_total_norm([each.grad for each in owned])))
        for each, momentum in zip(owned, self.momentum, strict=True):
            momentum.lerp_(each.grad / self.norms[-1], 0.1)
            each.sub_(momentum, alpha=self.param_groups[0]["lr"])


class Parts(Optimizer):
    """An optimizer for each parameter, in a list, with a smaller and smaller weight decay that
    counts the steps in one tensor, to which the state of each parameter refers."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        owned = self.param_groups[0]["params"]
        self.parts = [torch.optim.RMSprop([each], lr=lr) for each in owned]
        for each in owned:
            self.state[each]["made"] = self.state[owned[0]].get("made", torch.zeros(()))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        owned = self.param_groups[0]["params"]
        self.state[owned[0]]["made"] += 1
        for each, part in zip(owned, self.parts, strict=True):
            part.step()
            each.mul_(1 - 0.01 / float(self.state[each]["made"]))


class Lookahead(Optimizer):
    """Lookahead (arXiv:1907.08610) around an optimizer, as libraries have it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.made = optimizer, 0
        self.param_groups, self.state = optimizer.param_groups, defaultdict(dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.optimizer.step()
        self.made += 1
        if self.made % 5:
            return
        for each in self.param_groups[0]["params"]:
            slow = self.state[each].setdefault("slow", each.clone())
            each.copy_(slow.lerp_(each, 0.5))


class ScheduleFree(Optimizer):
    """Schedule-free SGD (arXiv:2405.15682): the model is an average."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "k": 0, "mode": True})

    def train(self) -> None:
        self._interpolate(training=True, weight=0.1)

    def eval(self) -> None:
        self._interpolate(training=False, weight=1 - 1 / 0.9)

    @torch.no_grad()
    def _interpolate(self, *, training: bool, weight: float) -> None:
        for group in self.param_groups:
            if group["mode"] is training:
                continue
            group["mode"] = training
            for each in group["params"]:
                if "z" in self.state[each]:
                    each.lerp_(self.state[each]["z"], weight)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["mode"], "a step needs train()"
            group["k"] += 1
            for each in group["params"]:
                z = self.state[each].setdefault("z", each.clone())
                average = each.lerp(z, 1 - 1 / 0.9)
                z.sub_(each.grad, alpha=group["lr"])
                average.lerp_(z, 1 / group["k"])
                each.copy_(average.lerp(z, 0.1))


def points(make: MakeOptimizer, clip: float | None = None) -> Callable[[], Points]:
    class With(Points):
        clip_norm = clip

        def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
            return make(list(parameters))

    return With


WithRMSprop = points(OPTIMIZERS["RMSprop"])


def schedule_free_twin(task: Points, model: nn.Module, optimizer: Any, *others: int) -> Metrics:
    train_plainly(task, model, optimizer, *others)
    optimizer.eval()
    return evaluate_plainly(task, model)


@grid
@pytest.mark.parametrize(
    "name",
    [
        *long("inherited", "own"),
        *extended(*(each for each in OPTIMIZERS if each not in FEW_OPTIMIZERS)),
    ],
)
def test_any_optimizer(name: str, workers: int) -> None:
    loop = schedule_free_twin if name == "schedule-free" else train_plainly
    assert_as_plain(points(OPTIMIZERS[name]), workers, loop=loop)


@pytest.mark.parametrize(
    "name", ["by hand", "lazy", "parts", "wrapped", "own", "RMSprop", "inherited"]
)
def test_a_step_that_is_made_again_leaves_what_one_step_does(name: str) -> None:
    # Given a worker's optimizer, and one that has the gradients of the whole batch
    models = nn.Linear(3, 2), nn.Linear(3, 2)
    models[1].load_state_dict(models[0].state_dict())
    parameters = [list(model.parameters()) for model in models]
    mine, plainly = (as_optimizer(OPTIMIZERS[name](each)) for each in parameters)
    again = MeanGradients(mine, parameters[0], lambda: None)

    # When each of the worker's steps is made again with the mean gradient
    for version in range(12):
        mean = torch.zeros(9)
        for own, whole in zip(*parameters, strict=True):
            own.grad, whole.grad = torch.randn_like(own), torch.randn_like(whole)
        again.capture()
        mine.step()
        again.read(mean)
        mean[:8] = torch.cat([each.grad.flatten() for each in parameters[1]])
        plainly.step()
        assert again.begin(version + 1, mean) is not None

    # Then it is as if they were never made without it
    for own, whole in zip(*parameters, strict=True):
        assert torch.equal(own, whole)


def test_workers_that_start_together_have_the_state_of_the_whole_batch() -> None:
    # Given a worker's AdamW, and one that has the gradient of the whole batch
    mine, whole = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))
    optimizers = [torch.optim.AdamW([each]) for each in (mine, whole)]
    again = MeanGradients(optimizers[0], [mine], lambda: None, restart=1)

    # When its step is made again with the mean gradient
    mine.grad, whole.grad = torch.randn(8), torch.randn(8)
    again.capture()
    optimizers[0].step()
    again.read(mean := torch.zeros(9))
    mean[:8] = whole.grad
    optimizers[1].step()

    # Then it starts from the published model, with the state of the whole batch
    assert again.begin(1, mean) is None
    states = [one.state[each] for one, each in zip(optimizers, (mine, whole), strict=True)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])


def test_the_optimizer_of_a_loop_starts_again_as_it_was(tmp_path: Path) -> None:
    before = f"from {__name__} import Lazy"
    made = "Lazy(model.parameters(), lr=0.1)"
    task = loop_script(tmp_path, own_steps(), before=before, optimizer=made)()
    model, optimizer = task.model(), task.optimizer([])
    assert isinstance(optimizer, Lazy)
    batch = default_collate([task.dataset("train")[index] for index in range(8)])
    parameters = [each.clone() for each in model.parameters()]

    task.loss(model, batch)
    assert optimizer.norms
    assert task.optimizer([]) is optimizer

    assert optimizer.momentum is None
    assert not hasattr(optimizer, "first")
    assert optimizer.norms == []
    # What it has trained is no state of the optimizer
    assert not torch.equal(parameters[0], next(iter(model.parameters())))


def test_a_wrapper_makes_the_steps_that_count() -> None:
    wrapper = OPTIMIZERS["wrapped"]([nn.Parameter(torch.ones(1))])

    assert as_optimizer([wrapper]) is wrapper


def test_an_optimizer_may_change_gradients_and_pass_its_closure_on() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = Clamped([weight], lr=0.1)

    def gradient() -> float:
        weight.grad = torch.tensor([5.0, 0.1])
        return 2.0

    gradient()
    closure = Closure(optimizer, 1.0, gradient)
    assert optimizer.step(closure) is None
    assert weight.grad is not None
    assert weight.grad.tolist() == [1.0, pytest.approx(0.1)]
    # One that moves parameters, or resets gradients, asks for new ones
    assert float(closure()) == 2.0
    closure = Closure(optimizer, 1.0, gradient)
    assert float(closure()) == 1.0
    optimizer.zero_grad(set_to_none=False)
    assert float(closure()) == 2.0


@pytest.mark.ci
@pytest.mark.parametrize(("name", "workers"), [("clipped AdamW", 2), ("RMSprop", 8)])
def test_a_transformer_with_a_schedule(name: str, workers: int, tmp_path: Path) -> None:
    topics = pydoc_data.topics.topics
    (tmp_path / "topics.txt").write_text("\n".join(topics[name] for name in sorted(topics)))
    args = {"data": str(tmp_path / "topics.txt"), "stride": 60}

    def make_task() -> Task:
        task = load_task("train:Text", args, TEXT)
        if name == "RMSprop":
            task.clip_norm = None
            vars(task)["optimizer"] = OPTIMIZERS[name]
        return task

    assert_as_plain(make_task, workers, 1)


#: The same training as a script.
RMSPROP = "torch.optim.RMSprop(model.parameters(), lr=1e-3)"


@grid
@pytest.mark.ci
def test_a_script_trains_as_its_task(tmp_path: Path, workers: int) -> None:
    make_task = loop_script(tmp_path, SESSION_STEPS, optimizer=RMSPROP)
    ends = [simulated(each, workers)["loss"] for each in (make_task, WithRMSprop)]
    assert ends[0] == pytest.approx(ends[1], rel=1e-6)


# -- lists of optimizers, and closures -------------------------------------------------------------


class WithLBFGS(Points):
    batch_size = 1024

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.LBFGS(parameters, lr=0.3, max_iter=4)


class Sam(Optimizer):
    """Sharpness-aware minimization (arXiv:2010.01412), as its usual implementation has it."""

    def __init__(self, parameters: Iterable[nn.Parameter], base: Callable[..., Optimizer]) -> None:
        super().__init__(parameters, {"rho": 0.05})
        self.base_optimizer = base(self.param_groups)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is not None, "SAM needs a closure"
        parameters = [each for group in self.param_groups for each in group["params"]]
        norm = torch.nn.utils.get_total_norm([each.grad for each in parameters])
        before = [each.clone() for each in parameters]
        for each in parameters:
            each.add_(each.grad * 0.05 / norm)
        self.zero_grad()
        with torch.enable_grad():
            closure()
        for each, old in zip(parameters, before, strict=True):
            each.copy_(old)
        self.base_optimizer.step()


class WithSam(Points):
    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return Sam(parameters, lambda groups: torch.optim.AdamW(groups, lr=3e-3))


def closure_twin(task: Points, model: nn.Module, optimizer: Any, epochs: int, seed: int) -> Metrics:
    data = task.dataset("train")
    for indices in orders(len(data), epochs, seed, task.batch_size):
        batch = task.collate([data[index] for index in indices])

        def closure(batch: Any = batch) -> Tensor:
            optimizer.zero_grad()
            loss = task.loss(model, batch)
            loss.backward()
            return loss

        if isinstance(optimizer, Sam):
            closure()
        optimizer.step(closure)
    return evaluate_plainly(task, model)


@pytest.mark.parametrize(
    ("task", "workers"),
    [
        (WithLBFGS, 1),
        pytest.param(WithSam, 4, marks=pytest.mark.ci),
        *(pytest.param(WithSam, each, marks=pytest.mark.extended) for each in (1, 8)),
    ],
)
def test_closures(task: type[Points], workers: int) -> None:
    assert_as_plain(task, workers, loop=closure_twin, seeds=(0,))


def test_several_workers_refuse_a_line_search() -> None:
    with pytest.raises(SpecError, match="LBFGS searches along a line") as refused:
        simulated(WithLBFGS, 4)
    assert refused.value.remedy == "set workers.max: 1, or use another optimizer"


#: A loop over epochs whose steps have a closure or not.
WITH_CLOSURE = """
batches = session.loader(data, batch_size=task.batch_size)
for epoch in range({epochs}):
    for batch in batches:

        def closure():
            optimizer.zero_grad()
            loss = task.loss(model, batch)
            loss.backward()
            {inside}
            return loss

        {step}
"""


@pytest.mark.ci
def test_a_closure_is_a_step_in_each_epoch_of_a_loop(tmp_path: Path) -> None:
    ends = []
    for step in ("optimizer.step(closure)", "closure(); optimizer.step()"):
        loop = WITH_CLOSURE.format(epochs=2, inside="pass", step=step)
        ends.append(simulated(loop_script(tmp_path, loop), 4, epochs=2)["loss"])

    assert ends[0] == pytest.approx(ends[1], rel=1e-6)

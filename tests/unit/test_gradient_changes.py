"""Statements of a loop that change gradients run again if they depend on nothing else."""

import ast
import inspect
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from vcasgd.task.gradient_changes import find_changes, gradient_uses, parsed
from vcasgd.task.loop_code import changes_after, changes_of_hook

LOOP = """
def clamp(parameters):
    for each in parameters:
        each.grad.clamp_(-1, 1)


def smooth(model, kept):
    for name, each in model.named_parameters():
        kept[name] = 0.9 * kept[name] + each.grad
        each.grad = kept[name]


largest, mean = 1.0, {}
for epoch in range(3):
    for batch in session.loader(data):
        optimizer.zero_grad()
        share = len(batch) / 64
        loss = model(batch).mean()
        loss.backward()
%s
        optimizer.step()
"""

FOR = "for p in model.parameters():\n    "
NORM = """
total = 0.0
for p in model.parameters():
    total += p.grad.norm().item() ** 2
factor = largest / (total ** 0.5 + 1e-6)
if factor < 1:
    for p in model.parameters():
        p.grad.mul_(factor)
"""


def changes_of(between: str) -> list[str]:
    source = LOOP % textwrap.indent(between.strip(), " " * 8)
    found = find_changes(parsed(source))
    return [ast.unparse(each) for one in found for each in one.statements]


@pytest.mark.parametrize(
    "between",
    [
        FOR + "p.grad.data.clamp_(-1, 1)",
        FOR + "p.grad = p.grad.clamp(-largest, largest)",
        FOR + "p.grad /= p.grad.norm() + 1e-8",
        FOR + "p.grad[:] = p.grad.sign()",
        FOR + "g = p.grad.data\n    g.sign_()",
        FOR + "if p.grad is not None:\n        p.grad -= p.grad.mean()",
        FOR + "torch.clamp(p.grad, -1, 1, out=p.grad)",
        FOR + "torch.nan_to_num_(p.grad)",
        "grads = [p.grad for p in model.parameters()]\ntorch._foreach_clamp_min_(grads, -1)",
        "clamp(model.parameters())",
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1)\n" + FOR + "p.grad.sign_()",
        NORM,
        (
            "norm = get_total_norm([p.grad for p in model.parameters()])\n"
            "torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1, norm)"
        ),
    ],
)
def test_changes_that_run_again(between: str) -> None:
    assert "\n".join(changes_of(between)) == ast.unparse(ast.parse(between))


@pytest.mark.parametrize(
    ("between", "chosen"),
    [
        (FOR + "p.grad.sign_()\nprint(p.grad)\nloss = loss.item()", [FOR + "p.grad.sign_()"]),
        ("norm = model[0].weight.grad.norm()\nclamp(model)", ["clamp(model)"]),
    ],
)
def test_what_only_reads_gradients_runs_once(between: str, chosen: list[str]) -> None:
    assert changes_of(between) == chosen


@pytest.mark.parametrize(
    "between",
    [
        pytest.param("pass", id="none"),
        pytest.param("print(model[0].weight.grad)", id="a report"),
        pytest.param("torch.nn.utils.clip_grad_norm_(model.parameters(), 1)", id="clipping alone"),
        pytest.param(FOR + "p.grad.mul_(share)", id="a value of the batch"),
        pytest.param(FOR + "p.grad.mul_(1 / (epoch + 1))", id="a value of the loop"),
        pytest.param(FOR + "p.grad += 0.1 * torch.randn_like(p.grad)", id="random numbers"),
        pytest.param(FOR + "p.grad.clamp_(-1, 1)\n    p.data.mul_(0.9)", id="parameters"),
        pytest.param(FOR + "mean[p] = mean[p] + p.grad\n    p.grad = mean[p]", id="a kept value"),
        pytest.param("largest = 0.9 * largest\n" + FOR + "p.grad.mul_(largest)", id="kept number"),
        pytest.param("smooth(model, mean)", id="a value that a function keeps"),
        pytest.param(FOR + "p.grad.sign_()\nloss.backward()", id="a further backward"),
        pytest.param(
            "if model[0].weight.grad.isnan().any():\n    continue\nclamp(model.parameters())",
            id="a decision",
        ),
    ],
)
def test_changes_that_are_left_alone(between: str) -> None:
    assert changes_of(between) == []


def test_gradients_that_are_gathered_before_are_left_alone() -> None:
    source = """
def train(batch):
    found = []
    for loss in losses(batch):
        loss.backward(retain_graph=True)
        found.append([p.grad.clone() for p in parameters])
    for p, *each in zip(parameters, *found):
        p.grad = sum(each)
    optimizer.step()
"""

    assert find_changes(parsed(source)) == []


def test_steps_under_a_condition_and_in_a_context() -> None:
    source = """
for batch in loader:
    with autocast():
        loss = model(batch)
        accelerator.backward(loss)
    if loader.ends_step:
        with torch.no_grad():
            for p in parameters:
                p.grad.sign_()
            optimizer.step()
"""

    (changes,) = find_changes(parsed(source))

    assert (changes.first, changes.last) == (5, 5)
    assert [ast.unparse(each) for each in changes.statements] == [
        "for p in parameters:\n    p.grad.sign_()"
    ]
    assert {id(each) for each in gradient_uses(parsed(source))} <= {id(n) for n in changes.nodes()}


CLOSURE = """
model, largest = make(), 1.0


def norm():
    return sum(p.grad.norm() ** 2 for p in model.parameters())


for batch in session.loader(data):
    share = len(batch)

    def closure():
        optimizer.zero_grad()
        loss = model(batch).mean()
        loss.backward()
        for p in model.parameters():
            p.grad.clamp_(-%s, largest)
        return loss

    optimizer.step(closure)
    %s
"""


BEFORE_CALLER = """
def gradients(batch):
    loss = model(batch).mean()
    loss.backward()
    return loss


def passed_on(batch):
    return gradients(batch)


def whole(batch):
    gradients(batch)
    optimizer.step()


for batch in session.loader(data):
    optimizer.zero_grad()
    %s
    for p in model.parameters():
        p.grad.sign_()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("call", "number"),
    [
        ("loss = gradients(batch)", 1),
        ("passed_on(batch)", 1),
        ("closure()", 1),
        ("whole(batch)", 0),
    ],
)
def test_changes_after_a_call_that_computes_gradients(call: str, number: int) -> None:
    assert len(find_changes(parsed(BEFORE_CALLER % call))) == number


@pytest.mark.parametrize(
    ("smallest", "after", "chosen"),
    [
        ("largest", "pass", [FOR + "p.grad.clamp_(-largest, largest)"]),
        ("share", "pass", []),
        ("1", "model[0].weight.grad.sign_()", []),
    ],
)
def test_changes_at_the_end_of_a_closure(smallest: str, after: str, chosen: list[str]) -> None:
    found = find_changes(parsed(CLOSURE % (smallest, after)))

    assert [ast.unparse(each) for one in found for each in one.statements] == chosen


def test_the_caller_of_a_function_that_computes_gradients_is_found(tmp_path: Path) -> None:
    (tmp_path / "loop_of_test.py").write_text("""
def backward(seen):
    seen.append(changes_after(sys._getframe()))


def train(model, seen, optimizer):
    backward(seen)
    largest = 1.0
    for each in model.parameters():
        each.grad.clamp_(-largest, largest)
    optimizer.step()
""")
    namespace: dict[str, Any] = {"changes_after": changes_after, "sys": sys}
    file = str(tmp_path / "loop_of_test.py")
    exec(compile(Path(file).read_text(), file, "exec"), namespace)
    seen: list[Any] = []
    model = nn.Linear(1, 1)
    (weight, bias) = model.parameters()
    weight.grad, bias.grad = torch.full([1, 1], 5.0), torch.full([1], -5.0)
    namespace["train"](model, seen, torch.optim.SGD(model.parameters()))

    # With the variables of its frame at the step.
    weight.grad, bias.grad = torch.full([1, 1], 7.0), torch.full([1], -7.0)
    (changes,) = seen
    changes()()

    assert (float(weight.grad), float(bias.grad)) == (1.0, -1.0)


class Hooks:
    largest = 1.0

    def clamps(self) -> None:
        for each in self.parameters():
            if each.grad is not None:
                each.grad.clamp_(-self.largest, self.largest)

    @torch.no_grad()
    def signs(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for each in group["params"]:
                each.grad.sign_()

    def reports(self) -> None:
        for each in self.parameters():
            self.log("norm", each.grad.norm())
            each.grad.sign_()

    def waits(self) -> None:
        if self.step < 100:
            return
        for each in self.parameters():
            each.grad.sign_()

    def draws(self) -> None:
        for each in self.parameters():
            each.grad += torch.randn_like(each.grad)

    def of_base(self) -> None:
        super().of_base()
        for each in self.parameters():
            each.grad.sign_()


class Model(nn.Linear):
    largest = 1.0


@pytest.mark.parametrize("name", ["clamps", "signs"])
def test_hooks_that_run_again(name: str) -> None:
    hook = inspect.unwrap(getattr(Hooks, name))
    code = changes_of_hook(hook)
    assert code is not None
    (weight, bias) = (model := Model(1, 1)).parameters()
    weight.grad, bias.grad = torch.full([1, 1], 7.0), torch.full([1], -7.0)
    optimizer = torch.optim.SGD(model.parameters())

    exec(code, {"self": model, "optimizer": optimizer})

    assert (float(weight.grad), float(bias.grad)) == (1.0, -1.0)


@pytest.mark.parametrize("name", ["reports", "waits", "draws", "of_base"])
def test_hooks_that_are_left_alone(name: str) -> None:
    assert changes_of_hook(getattr(Hooks, name)) is None

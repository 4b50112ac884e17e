"""Tasks that return the same optimizer each time, as scripts do."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from support.repeated import OPTIMIZERS, Machine, Noisy, assert_not_repeated
from torch import nn
from torch.optim import Optimizer

from vcasgd.session.script import ScriptTask
from vcasgd.verification.verifier import state_of

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

import vcasgd

model = nn.Linear(4, 3)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
session = vcasgd.Session(model, optimizer)
data = TensorDataset(torch.randn(160, 4, generator=torch.Generator().manual_seed(1)))

@session.evaluation(data)
def evaluate(model, batch):
    return {"count": torch.tensor(len(batch[0]))}

for (points,) in session.batches(data, 8):
    session.step(model(points).square().mean())
"""


class Reusing(Noisy):
    """Resets its optimizer, instead of making a new one."""

    made: Optimizer | None = None
    first: dict[str, Any]

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        if self.made is None:
            self.made = super().optimizer(parameters)
            self.first = self.made.state_dict()
        self.made.load_state_dict(copy.deepcopy(self.first))
        return self.made


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_a_reused_optimizer_is_corrected_once_after_a_rollback() -> None:
    # Given two equal machines, of which one reuses its optimizer
    machines = [Machine(task(OPTIMIZERS["adam"])) for task in (Noisy, Reusing)]
    for each in machines:
        each.interval()

    # When training goes back
    for each in machines:
        each.rollbacks = 1

    # Then both continue in the same way
    for _ in range(2):
        new, reused = (each.interval()[1].update for each in machines)
        assert torch.equal(new, reused)


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_a_repetition_leaves_a_reused_optimizer_alone(name: str) -> None:
    own, twin = (Machine(Reusing(OPTIMIZERS[name])) for _ in range(2))

    assert_not_repeated(own)

    twin.interval()
    for _ in range(2):
        one, two = own.interval()[1].update, twin.interval()[1].update
        assert torch.equal(one, two)


def test_a_repetition_leaves_the_optimizer_of_a_script_alone(script: Path) -> None:
    with closing(ScriptTask(script, {})) as task:
        assert_not_repeated(Machine(task))


def test_a_script_starts_each_subtask_with_the_state_of_its_optimizer(script: Path) -> None:
    # Given a script whose optimizer has made a step before the loop
    step = "model(torch.ones(1, 4)).sum().backward()\noptimizer.step()\n"
    script.write_text(SCRIPT.replace("session =", f"{step}session ="))
    with closing(ScriptTask(script, {})) as task:
        machine = Machine(task, update={"rule": "async-local-sgd"})
        first = state_of(machine.learner)

        # When it trains, and starts another subtask
        machine.interval()
        machine.learner.start_subtask()

        # Then the optimizer is as it was
        assert state_of(machine.learner).digest == first.digest

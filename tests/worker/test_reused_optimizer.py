"""Tasks that return the same optimizer each time, as scripts do."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from support.repeated import OPTIMIZERS, Machine, Noisy
from torch import nn
from torch.optim import Optimizer


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

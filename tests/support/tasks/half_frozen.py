"""The audit's task, followed by twice as many frozen parameters."""

import torch
from torch import nn

from vcasgd.chaos.task.audit import Audit


class HalfFrozen(Audit):
    def model(self) -> nn.Module:
        model = super().model()
        model.frozen = nn.Parameter(torch.full((2 * self.samples,), 0.3), requires_grad=False)
        return model

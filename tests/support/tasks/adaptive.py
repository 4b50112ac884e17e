"""The traced task with Adam, so it doesn't count."""

from collections.abc import Iterable

import torch
from torch import nn
from traced import Traced


class Adaptive(Traced):
    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters)

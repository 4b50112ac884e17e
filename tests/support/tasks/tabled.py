"""The audit's task, with its counters in a table of one row each."""

from torch import nn

from vcasgd.chaos.task.audit import Audit


class Tabled(Audit):
    def model(self) -> nn.Module:
        model = super().model()
        model.count = nn.Parameter(model.count.detach().view(-1, 1))
        return model

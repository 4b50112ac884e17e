"""Tasks whose training diverges: a parabola with too large a step, and a loss that turns NaN."""

import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import vcasgd
from vcasgd.chaos.task.audit import Indices

#: Seconds of a local step of a held job.
HELD_SECONDS = 0.2


class Parabola(vcasgd.Task):
    """A weight w with the loss w²/2, plus a little so that it never is 0.

    A step of size ``lr`` multiplies w by 1 − lr, so training diverges if lr is above 2. The rate
    is 0.25 at first, and ``steep`` after an eighth of the job. While the file ``broken`` exists,
    the loss is NaN. While the file ``hold`` exists, a local step takes longer.
    """

    batch_size = 5

    def __init__(
        self,
        samples: int,
        steep: float = 0.25,
        broken: str | None = None,
        hold: str | None = None,
        copies: int = 1,
    ) -> None:
        self._samples = samples
        self._steep = steep
        self._broken = Path(broken) if broken is not None else None
        self._hold = Path(hold) if hold is not None else None
        self._copies = copies

    def model(self) -> nn.Module:
        model = nn.Linear(self._copies, 1, bias=False)
        nn.init.ones_(model.weight)
        return model

    def dataset(self, split: str) -> Dataset[int]:
        return Indices(self._samples)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        if self._hold is not None and self._hold.exists():
            time.sleep(HELD_SECONDS)
        if self._broken is not None and self._broken.exists():
            return self._height(model) * float("nan")
        return self._height(model)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.25)

    def schedule(self, progress: float) -> float:
        return self._steep / 0.25 if progress >= 1 / 8 else 1.0

    def evaluate(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        return {"count": torch.tensor(len(batch)), "loss": self._height(model) * len(batch)}

    def _height(self, model: nn.Module) -> Tensor:
        (weight,) = model.parameters()
        return weight.square().sum() / 2 + 0.01

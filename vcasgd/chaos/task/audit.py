"""Task that counts: after training, each coordinate is the number of times its sample was applied.

Each sample owns one coordinate of the only parameter, in each of its copies. The gradient of the
loss is −1 on the coordinates of the batch and 0 elsewhere, and the optimizer is plain SGD with
learning rate 1, so a push adds exactly 1 to each coordinate that it trained. With
`async-local-sgd` and weight 1 the final vector equals the number of epochs everywhere, if and
only if every sample of every epoch was applied exactly once. (float32 counts exactly up to 2²⁴.)

With as many copies as store nodes, each shard holds one whole copy, which counts what was applied
to that shard.

`padding` parameters more, which never change, make the model as large as a real one.

With `bad`, one sample in 100 can't be loaded, and one in 400 has a loss that isn't a number.

With `hold`, local steps take time only while that file exists. Removing it lets the job end soon,
also on a slow machine.
"""

import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import vcasgd


class CountingModel(nn.Module):
    def __init__(self, samples: int, copies: int, padding: int = 0) -> None:
        super().__init__()
        self.copies = copies
        self.count = nn.Parameter(torch.zeros(copies * samples))
        self.padding = nn.Parameter(torch.zeros(padding))

    def forward(self, indices: Tensor) -> Tensor:
        return torch.index_select(self.count.view(self.copies, -1), 1, indices)


class Indices(Dataset[int]):
    def __init__(self, samples: int, *, bad: bool = False) -> None:
        self.samples = samples
        self.bad = bad

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        if self.bad and index % 100 == 50:
            raise ValueError("this sample is damaged")
        return index


class Audit(vcasgd.Task):
    #: Each sample adds 1 however batches are divided, although the loss is a sum.
    min_local_batch = 1

    def __init__(
        self,
        samples: int,
        batch_size: int,
        step_seconds: float = 0.0,
        copies: int = 1,
        hold: str | None = None,
        padding: int = 0,
        bad: bool = False,
    ) -> None:
        self.samples = samples
        self.bad = bad
        self.padding = padding
        self.copies = copies
        self.batch_size = batch_size
        self.evaluation_batch_size = samples
        self.step_seconds = step_seconds
        self.hold = Path(hold) if hold is not None else None

    def model(self) -> nn.Module:
        return CountingModel(self.samples, self.copies, self.padding)

    def dataset(self, split: str) -> Dataset[int]:
        return Indices(self.samples, bad=self.bad and split == "train")

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        if self.hold is None or self.hold.exists():
            time.sleep(self.step_seconds)
        applied: Tensor = model(batch)
        if self.bad:
            applied = applied.where(batch % 400 != 75, torch.nan)
        return -applied.sum()

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1.0)

    def evaluate(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        return {"count": torch.tensor(len(batch)), "applied": model(batch).sum() / self.copies}

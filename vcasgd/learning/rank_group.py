"""Processes of one worker that train each batch together: its ranks, one for each GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh

from vcasgd.errors import UserCodeError
from vcasgd.learning.gradient_sum import GradientSum, Reported
from vcasgd.learning.precision import StepPrecision

#: torch's type hints lack some of its names.
distributed: Any = torch.distributed
#: Interface over which ranks meet.
LOOPBACK = "lo"


class RankGroup:
    """One of ``size`` ranks, numbered from 0.

    Each trains its part of every batch with the same optimizer, so their models stay the same bit
    for bit. With a ``mesh``, each has a part of one model. ``reported`` converts errors of the
    group, as in :class:`GradientSum`.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        group: ProcessGroup,
        reported: Reported,
        mesh: Any = None,
    ) -> None:
        self.rank, self.size = rank, size
        self.mesh = mesh
        self._group = group
        self._reported = reported
        self._sum: GradientSum | None = None
        #: True if this rank has samples in the present step.
        self._trains = True

    @classmethod
    def connect(
        cls,
        rank: int,
        size: int,
        path: Path,
        timeout: float,
        device: str,
        reported: Reported,
        *,
        sharded: bool = False,
    ) -> RankGroup:
        """Meet the other ranks over a file at ``path``, each wait for at most ``timeout`` seconds.

        No global process group is made, so libraries see a single process, unless they have parts
        of one model: ``sharded``. Raises :class:`RuntimeError` if not all ranks arrive.
        """
        store, limit = distributed.FileStore(str(path), size), timedelta(seconds=timeout)
        store.set_timeout(limit)
        options: Any
        group: Any
        if sharded:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
            backend = "nccl" if device == "cuda" else "gloo"
            distributed.init_process_group(
                backend, store=store, rank=rank, world_size=size, timeout=limit
            )
            mesh = init_device_mesh(device, (size,))
            return cls(rank, size, distributed.group.WORLD, reported, mesh)
        if device == "cuda":
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = limit
            group = distributed.ProcessGroupNCCL(store, rank, size, options)
        else:
            options = distributed.ProcessGroupGloo._Options()
            options._timeout = limit
            device_ = distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")
            options._devices = [device_]
            group = distributed.ProcessGroupGloo(store, rank, size, options)
        return cls(rank, size, group, reported)

    def set_timeout(self, seconds: float) -> None:
        """Bound each later wait for another rank."""
        self._group.set_timeout(timedelta(seconds=seconds))

    def own(self, count: int) -> tuple[int, int]:
        """Return the range of this rank in ``count`` samples, which can be empty."""
        return count * self.rank // self.size, count * (self.rank + 1) // self.size

    def part(self, samples: list[int]) -> tuple[list[int], int]:
        """Return this rank's samples of a step, and the least number that any rank has.

        If there are too few, it is one whose weight is 0.
        """
        start, stop = self.own(len(samples))
        return samples[start:stop] or samples[-1:], max(1, len(samples) // self.size)

    def batches(
        self,
        model: nn.Module,
        loaded: Iterator[tuple[Any, int]],
        counts: Sequence[int],
        precision: StepPrecision,
    ) -> Iterator[tuple[Any, int]]:
        """Yield this rank's batches with their weights; ``counts`` has the samples of whole steps.

        Gradients of the model are summed over all ranks meanwhile.
        """
        if self.mesh is None and (self._sum is None or not self._sum.fits(model)):
            self._leave_gradients()
            self._sum = GradientSum(model, self._group, self._reported)
        for (batch, _), count in zip(loaded, counts, strict=True):
            start, stop = self.own(count)
            self._trains = stop > start
            if self._sum is not None:
                self._sum.weight = (stop - start) / count
            else:
                # FSDP averages gradients over the ranks.
                precision.weight = self.size * (stop - start) / count
            yield batch, stop - start

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Report errors of the group in calls of the user's code as those of the group."""
        try:
            yield
        except UserCodeError as error:
            cause = error.__cause__
            if isinstance(cause, RuntimeError) and _is_of_group(cause):
                raise self._reported(cause) from error
            raise

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over the ranks of a tensor of the user's model, with its gradient.

        That of a rank without samples doesn't count.
        """
        # FSDP has weighted the losses; gradients of the others are weighted when they are summed.
        weight = 1.0 if self._sum is None else self._sum.weight
        total: Tensor = _Sum.apply(tensor * self._trains, self._group, weight)  # type: ignore[no-untyped-call]
        return total

    @torch.no_grad()
    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors, such as running statistics, by their means over the ranks."""
        for tensor in tensors:
            try:
                self._group.allreduce([tensor]).wait()
            except RuntimeError as error:
                raise self._reported(error) from error
            tensor.div_(self.size)

    def close(self) -> None:
        """Leave the group, and later gradients alone."""
        self._leave_gradients()
        if self.mesh is not None:
            distributed.destroy_process_group()

    def _leave_gradients(self) -> None:
        if self._sum is not None:
            self._sum.close()
            self._sum = None


class _Sum(torch.autograd.Function):
    """Sum of a tensor over ranks whose losses count by ``weight``, as their gradients do later."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, group: ProcessGroup, weight: float) -> Tensor:
        context.group, context.weight = group, weight
        total = tensor.clone()
        group.allreduce([total]).wait()
        return total

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        total = gradient * context.weight
        context.group.allreduce([total]).wait()
        return total / (context.weight or torch.inf), None, None


def share_norms(model: nn.Module, group: RankGroup | None) -> None:
    """Let each ``SyncBatchNorm`` normalize with the statistics of all ranks of a group.

    torch's own works neither on a CPU nor without a global group. Without a group, it is a
    ``BatchNorm``.
    """
    for each in model.modules():
        if isinstance(each, nn.SyncBatchNorm):
            each.forward = _forward_of(each, group)  # type: ignore[method-assign,assignment]


def _forward_of(norm: nn.SyncBatchNorm, group: RankGroup | None) -> Callable[[Tensor], Tensor]:
    def forward(given: Tensor) -> Tensor:
        measures = norm.training or norm.running_mean is None
        if group is None or not measures:
            return nn.BatchNorm2d.forward(norm, given)
        return _normalized(norm, given, group)

    return forward


def _normalized(norm: nn.SyncBatchNorm, given: Tensor, group: RankGroup) -> Tensor:
    numbers = given if given.dtype == torch.float64 else given.float()
    others, shape = [0, *range(2, given.dim())], [1, -1] + [1] * (given.dim() - 2)
    own = torch.full_like(numbers[:1].flatten()[:1], numbers.numel() / numbers.shape[1])
    total = group.sum(torch.cat([numbers.sum(others), own]))
    count = total[-1].detach()
    mean = total[:-1] / count
    centered = numbers - mean.view(shape)
    variance = group.sum(centered.square().sum(others)) / count
    normal = centered * (variance + norm.eps).rsqrt().view(shape)
    if norm.affine:
        normal = normal * norm.weight.view(shape) + norm.bias.view(shape)
    if norm.training and norm.running_mean is not None:
        _follow(norm, mean.detach(), variance.detach() * count / (count - 1))
    return normal.to(given.dtype)


@torch.no_grad()
def _follow(norm: nn.SyncBatchNorm, mean: Tensor, variance: Tensor) -> None:
    """Move running statistics towards those of a batch, as ``BatchNorm`` does."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked.add_(1)
    share = norm.momentum if norm.momentum is not None else 1 / float(norm.num_batches_tracked)
    norm.running_mean.lerp_(mean.to(norm.running_mean), share)
    norm.running_var.lerp_(variance.to(norm.running_var), share)


def _is_of_group(error: RuntimeError) -> bool:
    # Those of Gloo have no class of their own.
    return isinstance(error, distributed.DistError) or "gloo" in str(error)

"""Sum of the gradients of several processes that train one batch together.

It is computed during the backward pass, as in DistributedDataParallel (Li et al. 2020,
arXiv 2006.15704): gradients are gathered in buckets, from the last layer to the first, and a bucket
is added while earlier layers are still computed. It works on parameters instead of modules, so the
user's code may call any part of the model, in any order, and more than one backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work

from vcasgd.errors import SpecError

#: Bytes of a bucket: large enough for the bandwidth, small enough that the first one is soon full.
BUCKET_BYTES = 25 << 20

#: Turns an error of the process group into one that says which process is at fault.
Reported = Callable[[RuntimeError], Exception]


@dataclass
class _Bucket:
    """Parameters of one type on one device, and memory for their gradients."""

    parameters: list[nn.Parameter]
    sums: Tensor
    views: list[Tensor] = field(default_factory=list)
    missing: int = 0
    work: Work | None = None

    @classmethod
    def of(cls, parameters: list[nn.Parameter]) -> _Bucket:
        first = parameters[0]
        sizes = [each.numel() for each in parameters]
        sums = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        parts = torch.split(sums, sizes)
        views = [part.view_as(each) for part, each in zip(parts, parameters, strict=True)]
        return cls(parameters, sums, views, len(parameters))


class GradientSum:
    """Replaces each gradient by ``Σ weight · gradient`` over the processes of a group.

    The weights of all processes add up to 1, so a gradient that is summed twice, as with several
    backward passes, stays the same. All processes make the same backward passes. ``group`` sums
    tensors where the model is. Its errors are raised in ``backward()`` as ``reported`` returns
    them.
    """

    def __init__(self, model: nn.Module, group: ProcessGroup, reported: Reported) -> None:
        self._group = group
        self._reported = reported
        #: Share of this process in the samples of the next step.
        self.weight = 1.0
        parameters = [each for each in model.parameters() if each.requires_grad]
        self._buckets = [_Bucket.of(part) for part in _parts(reversed(parameters))]
        self._bucket_of = {each: bucket for bucket in self._buckets for each in bucket.parameters}
        self._started = 0
        self._armed = False
        self._hooks: list[Any] = [
            each.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
            for each in parameters
        ]

    def close(self) -> None:
        """Leave later gradients alone."""
        for hook in self._hooks:
            hook.remove()

    def fits(self, model: nn.Module) -> bool:
        """Return True if the model's trainable parameters are those that are summed."""
        return {each for each in model.parameters() if each.requires_grad} == set(self._bucket_of)

    def _on_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise SpecError(
                "task: sparse gradients can't be added over the processes of a machine",
                remedy="set workers.gpus: 1, or use sparse=False",
                field="workers.gpus",
            )
        if not self._armed:
            self._armed = True
            # The same hook as that of torch's own data parallelism.
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._finish)
        bucket = self._bucket_of[parameter]  # type: ignore[index]
        bucket.missing -= 1
        if bucket.missing == 0:
            self._start_full()

    @torch.no_grad()
    def _start_full(self) -> None:
        """Start the sums of full buckets, in the order that all processes have."""
        while self._started < len(self._buckets):
            bucket = self._buckets[self._started]
            if bucket.missing > 0:
                return
            self._start(bucket)

    def _start(self, bucket: _Bucket) -> None:
        self._started += 1
        bucket.sums.zero_()
        found = [
            (view, parameter.grad)
            for view, parameter in zip(bucket.views, bucket.parameters, strict=True)
            if parameter.grad is not None
        ]
        if found:
            views, gradients = map(list, zip(*found, strict=True))
            torch._foreach_copy_(views, gradients)
        bucket.sums.mul_(self.weight)
        try:
            bucket.work = self._group.allreduce([bucket.sums])
        except RuntimeError as error:
            raise self._reported(error) from error

    @torch.no_grad()
    def _finish(self) -> None:
        """Sum the rest at the end of a backward pass, and set all gradients."""
        self._armed = False
        for bucket in self._buckets[self._started :]:
            self._start(bucket)
        self._started = 0
        for bucket in self._buckets:
            assert bucket.work is not None
            try:
                bucket.work.wait()
            except RuntimeError as error:
                raise self._reported(error) from error
            bucket.work, bucket.missing = None, len(bucket.parameters)
            for view, parameter in zip(bucket.views, bucket.parameters, strict=True):
                if parameter.grad is not None:
                    parameter.grad.copy_(view)
                elif view.any():  # only another process used this parameter
                    parameter.grad = view.clone()


def _parts(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    for _, alike in groupby(parameters, key=lambda each: (each.dtype, each.device)):
        part: list[nn.Parameter] = []
        size = 0
        for parameter in alike:
            if part and size + parameter.nbytes > BUCKET_BYTES:
                yield part
                part, size = [], 0
            part.append(parameter)
            size += parameter.nbytes
        yield part

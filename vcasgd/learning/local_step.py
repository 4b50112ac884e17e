"""One local step of training: loss, gradient, clipping, and the optimizer's step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vcasgd.errors import NonFiniteLoss, UserCodeError, VcasgdError
from vcasgd.learning.precision import StepPrecision, autocast
from vcasgd.learning.rates import clip
from vcasgd.task.task import Task, calling_user_code


def make_step(
    task: Task,
    model: nn.Module,
    optimizer: Optimizer,
    parts: Iterable[tuple[Any, float]],
    step: int,
    device: torch.device | str,
    precision: StepPrecision,
    clip_factor: float,
) -> float:
    """Make one local step and return the loss before it.

    ``parts`` are its micro-batches with their shares of its samples.
    """
    optimizer.zero_grad(set_to_none=True)
    mean = 0.0
    for batch, share in parts:
        with user_code("loss"), autocast(task, device):
            loss = task.loss(model, to_device(batch, device))
            if task.makes_steps:
                return _scalar(loss)
        mean += share * backward(loss, step, share, precision)
    update(task, optimizer, step, precision, clip_factor)
    return mean


def backward(loss: Tensor, step: int, share: float, precision: StepPrecision) -> float:
    """Add the gradient of a mean loss, a scalar, times ``share``, and return the loss.

    ``step`` is the step's number in error messages. Raises :class:`NonFiniteLoss` before the
    parameters or the optimizer's state are affected, and :class:`UserCodeError`.
    """
    on_gpu = isinstance(loss, Tensor) and loss.is_cuda
    read = _copied_scalar(loss) if on_gpu else partial(_scalar, loss)
    if not on_gpu:
        _check_finite(read, step)
    with user_code("backward of the loss"):
        part = loss if share == 1 else loss * share
        precision.scaled(part).backward()  # type: ignore[no-untyped-call]
    # The GPU computes the gradient meanwhile.
    return _check_finite(read, step)


def _copied_scalar(loss: Tensor) -> Callable[[], float]:
    """Start to copy a scalar from a GPU; the function waits for the copy, not for later work."""
    if loss.numel() != 1:
        return partial(_scalar, loss)
    host = torch.empty(loss.shape, dtype=loss.dtype, pin_memory=True)
    host.copy_(loss.detach(), non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()

    def wait() -> float:
        copied.synchronize()
        return host.item()

    return wait


def _check_finite(read: Callable[[], float], step: int) -> float:
    with user_code("loss"):
        value = read()
    if not math.isfinite(value):
        raise NonFiniteLoss(
            f"the loss is {value} in local step {step}",
            remedy="lower the learning rate, clip gradients, or check the data for NaN",
            step=step,
        )
    return value


def update(
    task: Task,
    optimizer: Optimizer,
    step: int,
    precision: StepPrecision,
    clip_factor: float = 1.0,
) -> None:
    """Clip the gradients and make one step of the optimizer.

    Raises :class:`NonFiniteLoss` and :class:`UserCodeError`.
    """
    may_overflow = precision.scales
    with user_code("optimizer.step"):
        precision.step(
            optimizer,
            lambda: clip(task, optimizer, step, clip_factor, may_overflow=may_overflow),
            step,
        )


def _scalar(loss: object) -> float:
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return float(loss.item())
    value = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    raise UserCodeError(f"loss returned {value}, not a scalar tensor", remedy="return its mean")


def to_device(batch: Any, device: torch.device | str) -> Any:
    """Return a batch with every tensor on ``device``.

    Tensors can be in nested lists, tuples, and mappings. Values without a device stay as they are.
    A tensor in pinned memory is copied while the GPU computes.
    """
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if hasattr(batch, "to"):  # a PackedSequence, a tokenizer's BatchEncoding, …
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        moved = [to_device(value, device) for value in batch]
        named = hasattr(batch, "_fields")
        return type(batch)(*moved) if named else type(batch)(moved)
    return batch


@contextmanager
def user_code(name: str) -> Iterator[None]:
    """Convert exceptions of the user's code to :class:`UserCodeError` with their traceback."""
    try:
        yield
    except VcasgdError:
        raise
    except Exception as error:
        raise calling_user_code(name, error) from error

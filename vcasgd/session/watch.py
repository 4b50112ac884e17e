"""Calls of torch that a loop makes, watched while it trains."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

if TYPE_CHECKING:
    from vcasgd.session.loader import BatchLoader

#: Loader whose batches this thread trains.
_loader_of_thread: ContextVar[BatchLoader | None] = ContextVar("vcasgd_loader", default=None)
#: Order of the norm that this thread has computed last.
_norm_type: ContextVar[Any] = ContextVar("vcasgd_norm_type", default=2.0)


@contextmanager
def unwatched() -> Iterator[None]:
    """Clip as the job, and not as its loop."""
    token = _loader_of_thread.set(None)
    try:
        yield
    finally:
        _loader_of_thread.reset(token)


_backward: Any = torch.autograd.backward
_grad: Any = torch.autograd.grad
_scale: Any = torch.amp.GradScaler.scale
_step: Any = torch.amp.GradScaler.step
_clipping: Any = torch.nn.utils.clip_grad
_clip: Any = _clipping._clip_grads_with_norm_
_total_norm: Any = _clipping._get_total_norm
_clip_values: Any = _clipping.clip_grad_value_
#: Guards the number of loops that are watched.
_watch_lock = threading.Lock()
_loops = 0


@contextmanager
def watch(loader: BatchLoader) -> Iterator[None]:
    """Tell a loader of ``backward``, scalers of gradients, and clipping in this thread.

    Hooks of an optimizer get no losses, don't run for a step that a scaler skips, and come after
    the loop's clipping. After the last loop, torch is as it was.
    """
    before = _loader_of_thread.get()
    _count_loops(1)
    _loader_of_thread.set(loader)
    try:
        yield
    finally:
        _loader_of_thread.set(before)
        _count_loops(-1)


def _count_loops(change: int) -> None:
    global _loops
    scaler = torch.amp.GradScaler
    watched = (
        (torch.autograd, "backward", _backward, _watched_backward),
        (scaler, "scale", _scale, _watched_scale),
        (scaler, "step", _step, _watched_step),
        (_clipping, "_clip_grads_with_norm_", _clip, _watched_clip),
        (_clipping, "_get_total_norm", _total_norm, _watched_total_norm),
        # They have no inner functions, and modules of scripts import them.
        *(
            (module, name, before, during)
            for module in list(sys.modules.values())
            for name, before, during in (
                ("grad", _grad, _watched_grad),
                ("clip_grad_value_", _clip_values, _watched_clip_values),
            )
            if name in getattr(module, "__dict__", ())
        ),
    )
    with _watch_lock:
        _loops += change
        for owner, name, before, during in watched:
            # Unless another library has replaced it meanwhile.
            if getattr(owner, name) is (before if _loops else during):
                setattr(owner, name, during if _loops else before)


def _watched_backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
    loader = _loader_of_thread.get()
    given = tensors if isinstance(tensors, list | tuple) else [tensors]
    # An edge of a graph is a tuple, too.
    if loader is not None and all(isinstance(each, Tensor) and each.numel() == 1 for each in given):
        tensors = [loader.weighted(each) for each in given]
    _backward(tensors, *args, **kwargs)
    if loader is not None:
        loader.expect_changes(sys._getframe(1))


def _watched_grad(outputs: Any, *args: Any, **kwargs: Any) -> Any:
    loader = _loader_of_thread.get()
    if loader is not None:
        loader.note_differentiated(outputs)
    return _grad(outputs, *args, **kwargs)


def _watched_scale(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
    scaled, loader = _scale(scaler, outputs), _loader_of_thread.get()
    if loader is not None and isinstance(outputs, Tensor):
        loader.note_scaled(scaled, outputs, scaler.get_scale)
    return scaled


def _watched_step(
    scaler: torch.amp.GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any
) -> Any:
    loader = _loader_of_thread.get()
    if loader is None or not loader.makes_steps_of(optimizer) or not scaler.is_enabled():
        return _step(scaler, optimizer, *args, **kwargs)
    if not scaler._found_inf_per_device(optimizer):
        # The hooks of the optimizer need gradients that aren't scaled.
        scaler.unscale_(optimizer)
    overflows = any(found.item() for found in scaler._found_inf_per_device(optimizer).values())
    result = _step(scaler, optimizer, *args, **kwargs)
    loader.end_scaled_step(overflows=overflows)
    return result


def _watched_total_norm(gradients: Any, norm_type: Any = 2.0, *args: Any, **kwargs: Any) -> Any:
    _norm_type.set(norm_type)
    return _total_norm(gradients, norm_type, *args, **kwargs)


def _watched_clip(
    parameters: Any, max_norm: float, total_norm: Tensor, *args: Any, **kwargs: Any
) -> None:
    clipped, norm_type = _listed(parameters), _norm_type.get()

    def clip_by(factor: float, norm: Tensor | None = None) -> None:
        if norm is None:
            gradients = [each.grad for each in clipped if each.grad is not None]
            norm = _total_norm(gradients, norm_type)
        _clip(clipped, max_norm * factor, norm, *args, **kwargs)

    _clip_in_loop(clipped, partial(clip_by, norm=total_norm), partial(clip_by, 1.0))


def _watched_clip_values(parameters: Any, clip_value: float, *args: Any, **kwargs: Any) -> None:
    clipped = _listed(parameters)

    def clip_by(factor: float) -> None:
        _clip_values(clipped, clip_value * factor, *args, **kwargs)

    _clip_in_loop(clipped, clip_by, partial(clip_by, 1.0))


def _listed(parameters: Any) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def _clip_in_loop(
    parameters: list[Tensor], now: Callable[[float], None], again: Callable[[], None]
) -> None:
    loader = _loader_of_thread.get()
    if loader is None:
        now(1.0)
    else:
        loader.clip(parameters, now, again)

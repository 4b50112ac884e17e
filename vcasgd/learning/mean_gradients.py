"""Steps of an optimizer with the mean gradient of a round, as one process makes them.

A worker's own step sees the gradient of its part of the batch, whose noise is in every state that
isn't linear in it: second moments, norms, signs. So the update of an interval of one step carries
the gradient beside the difference of the model, and the next base has the mean over the round,
which is the gradient of the job's whole batch. The worker goes back to before its own step and
makes it again with the mean. It knows then, as every other worker of the round, the state and the
parameters that one process would have, and trains on from there. That holds for any optimizer that
makes its steps from gradients. If only clipping needs the mean, the worker takes over the state,
and trains on from the published model, which is nearly where one process would be.

The published model is what the workers started from, moved by the mean of their own steps. Each
update also has the difference to the exact start, so it lags by one step and errors don't add up.

The gradients are the end of the vector, behind the statistics, and averaged like them. Behind them
is a mark of the version that they belong to: the mean of the marks is the mark of one version only
if each update of the round is a single step from it, and no member is missing. Otherwise the
worker keeps its own step, and trains on from the published model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from vcasgd.learning.base import as_real
from vcasgd.learning.gradient_hooks import GradientHooks, step_hooks
from vcasgd.learning.local_moments import LocalMoments
from vcasgd.learning.optimizers import (
    OptimizerList,
    State,
    gradient_first,
    saved,
    set_mode,
    settings_of,
    trained_by,
)
from vcasgd.spec.job import JobSpec
from vcasgd.spec.sections import Tuning
from vcasgd.spec.update import RoundsSpec
from vcasgd.task.loop_clips import Clip, LoopClips
from vcasgd.task.task import Task

#: Numbers of a vector behind the gradients.
MARKS = 1
#: Marks of versions are below this, so that float32 averages them nearly exactly.
DIFFERENT_MARKS = 4096
#: Largest error of a mean of equal marks. Different ones differ by more, unless nearly all of a
#: round's samples are from one version.
MARK_ERROR = 0.01
#: Mark of gradients that are not those of a single step.
NO_MARK = -1.0
#: Updates after which workers start from the published model again. A new worker's optimizer has
#: another state, and a schedule gives workers other rates, so their steps lead away from each
#: other. Nothing but this brings them together.
RESTART = 256

#: Largest vector of a model whose gradients are exchanged: they double what travels, and all
#: rounds have one step, however long an exchange takes.
MAX_FLOATS = 1_000_000


def needs_mean_gradients(
    spec: JobSpec,
    task: Task,
    floats: int,
    make_optimizer: Callable[[], Optimizer],
    *,
    alike: bool = False,
    hooked: bool = False,
) -> bool:
    """Return True if workers train as one process only with the gradients of whole batches.

    ``floats`` is the length of the model's vector. Moments of some optimizers can be corrected
    instead (:mod:`vcasgd.learning.local_moments`), which costs nothing, but second ones can't if
    successive samples are ``alike``. ``hooked`` is True if hooks may change gradients.
    """
    update = spec.update
    if not isinstance(update, RoundsSpec) or spec.workers.max == 1:
        return False
    if update.codec not in ("auto", "float32"):
        return False
    if spec.push_every not in (None, 1) or not spec.keeps_optimizer or spec.tuning != Tuning():
        return False
    if floats > MAX_FLOATS or spec.workers.gpus != 1 or task.mixed_precision == "fp16":
        return False
    optimizer = make_optimizer()
    moments = moments_of(optimizer)
    return bool(
        task.clip_norm is not None
        or task.clips_itself
        or hooked
        or step_hooks(optimizer)
        or moments.uncorrected
        or (alike and moments.corrects_noise)
    )


def moments_of(optimizer: Optimizer) -> LocalMoments:
    """Return what is known about an optimizer's moments, and leave it alone."""
    moments = LocalMoments(optimizer)
    moments.close()
    return moments


class _Before:
    """Parameters and state of one optimizer before its step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.parameters = {each: each.detach().clone() for each in trained_by(optimizer)}
        self._give_back = saved(optimizer)

    def restore(self) -> None:
        """Give the optimizer all of it again."""
        for parameter, value in self.parameters.items():
            parameter.copy_(value)
        self._give_back()


@dataclass
class _Step:
    """A step that may be made again: what was before it, and its gradients.

    ``gradients`` are those of the local batch, before clipping, by parameters. In a loop, those of
    one optimizer can be computed after the step of another. ``clips`` repeat a loop's own clipping.
    The gradients of ``hooked`` parameters are those before their hooks. ``settings`` are those of
    the groups after the step.
    """

    before: dict[Optimizer, _Before] = field(default_factory=dict)
    settings: dict[Optimizer, list[State]] = field(default_factory=dict)
    gradients: dict[Tensor, Tensor] = field(default_factory=dict)
    clips: list[Clip] = field(default_factory=list)
    hooked: set[Tensor] = field(default_factory=set)


class MeanGradients:
    """Makes the steps of ``optimizer`` again with mean gradients, until :meth:`close`.

    ``parameters`` are all of the model that are trained, in the order of the vector. ``clip``
    clips the gradients of a step with the whole batch. Workers start from the published model again
    after ``restart`` updates: in each round, with 1, which keeps them together under any schedule.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[Tensor],
        clip: Callable[[], None],
        restart: int = RESTART,
    ) -> None:
        self._optimizer, self._parameters, self._clip = optimizer, parameters, clip
        self.restart = restart
        #: Records the gradient clipping of a loop.
        self.loop_clips = LoopClips()
        self._gradient_hooks = GradientHooks(parameters)
        #: The last step; None if it is final.
        self._step: _Step | None = None
        self._steps = 0
        #: Calls of ``step`` that haven't returned: that of a class can call that of its base.
        self._calls = 0
        #: Version that the last step started from.
        self._version = 0
        #: False in steps with the whole batch, which are final.
        self.captures = True
        #: True if steps can't be made again; and if some of them weren't, because the loop makes no
        #: step of some optimizers, or changes parameters itself.
        self.gave_up = self.keeps_own = False
        #: The optimizers that a loop steps.
        self._optimizers = optimizer.parts if isinstance(optimizer, OptimizerList) else (optimizer,)
        self._hooks = []
        #: True if a loop makes the steps; parameters after them, and True if it has changed those.
        self._in_loop = self._changes = False
        self._after: dict[Tensor, Tensor] = {}
        for part in self._optimizers:
            before = part.register_step_pre_hook(self._capture_in_loop)
            self._hooks += [before, part.register_step_post_hook(self._count)]
            # Before another hook clips the gradients.
            hooks: Any = part._optimizer_step_pre_hooks
            hooks.move_to_end(before.id, last=False)

    def close(self) -> None:
        """Leave the optimizer alone from now on."""
        for hook in self._hooks:
            hook.remove()
        self._gradient_hooks.close()

    def begin(self, version: int, mean: Tensor | None) -> list[Tensor] | None:
        """Make the last step again if ``mean``, float32 [parameters + 1], has its mean gradient.

        Without one, the last step is final. Returns the parameters to start from, in their order,
        or None for those of ``version``.
        """
        step, before, self._step = self._step, self._version, None
        single, self._steps, self._version = self._is_single, 0, version
        self._calls = 0
        if (
            step is None
            or mean is None
            or not single
            or abs(float(mean[-1]) - mark(before)) > MARK_ERROR
        ):
            return None
        with torch.no_grad():
            self._make_again(step, mean)
        set_mode(self._optimizer, training=False)
        if version // self.restart != before // self.restart or self._changes:
            return None
        return [each.detach().clone() for each in self._parameters]

    @torch.no_grad()
    def capture(self, *parts: Optimizer) -> None:
        """Note the gradients and the state before the step of these optimizers, by default all.

        Does nothing for those that are noted.
        """
        if not self.captures or self.gave_up:
            self.loop_clips.forget()
            return
        self._step = self._step or _Step()
        for part in parts or self._optimizers:
            if part in self._step.before:
                continue
            owned = trained_by(part)
            unclipped, clips = self.loop_clips.take(owned)
            gradients = {
                each: unclipped[each] if each in unclipped else each.grad.clone()
                for each in owned
                if each.grad is not None
            }
            before_hooks = self._gradient_hooks.take(gradients, self.loop_clips.scale)
            self._step.gradients |= gradients | before_hooks
            self._step.hooked |= before_hooks.keys()
            self._step.clips += clips
            self._step.before[part] = _Before(part)

    def _capture_in_loop(self, part: Optimizer, args: Any, options: Any) -> Any:
        self._calls += 1
        if self._calls > 1 or (self._step is not None and part in self._step.before):
            return None
        present = gradient_first(part, args, options)
        self.capture(part)
        self._in_loop = True
        return present

    def give_up(self) -> None:
        """Keep the steps of an optimizer that needs more than their gradients."""
        self.captures, self.gave_up, self._step = False, True, None

    @property
    def _is_single(self) -> bool:
        return self._steps == len(self._optimizers)

    def _count(self, part: Optimizer, *_: Any) -> None:
        self._calls -= 1
        if self._calls:
            return
        self._steps += 1
        if self._step is not None:
            self._step.settings[part] = settings_of(part)
        if self._in_loop and self._step is not None:
            owned = self._step.before[part].parameters
            self._after |= {each: each.detach().clone() for each in owned}

    def read(self, out: Tensor) -> None:
        """Copy the gradients of the last step into ``out``, float32 [parameters + 1]."""
        out.zero_()
        self._changes = any(not torch.equal(each, end) for each, end in self._after.items())
        self._after = {}
        single = self._step is not None and self._is_single
        some = 0 < self._steps < len(self._optimizers)
        self.keeps_own |= some or self._changes
        out[-1] = mark(self._version) if single else NO_MARK
        if not single:
            return
        assert self._step is not None
        for parameter, part in zip(self._parameters, self._parts(out), strict=True):
            gradient = self._step.gradients.get(parameter)
            if gradient is not None:
                part.copy_(as_real(gradient.to_dense() if gradient.is_sparse else gradient))
        if not out.isfinite().all():
            # A fused optimizer has skipped the step.
            out.zero_()
            out[-1] = NO_MARK

    def _make_again(self, step: _Step, mean: Tensor) -> None:
        # A rate, for example, that a loop sets by hand after a step is that of the next one.
        set_since = {one: _set_since(one, step.settings[one]) for one in self._optimizers}
        own = [each.grad for each in self._parameters]
        for one in reversed(self._optimizers):
            step.before[one].restore()
        for parameter, part in zip(self._parameters, self._parts(mean), strict=True):
            parameter.grad = _like(step.gradients.get(parameter), part, parameter)
        self._gradient_hooks.repeat(step.hooked)
        for clip in step.clips:
            clip()
        self._clip()
        self._calls = 1  # What a step calls in turn is no step of the worker's.
        for one in self._optimizers:
            for hook in step_hooks(one):
                hook(one, (), {})
            _step_of(one)(one)
            for group, fields in zip(one.param_groups, set_since[one], strict=True):
                group.update(fields)
        self._calls = 0
        # A loop may reset them to zeros, which move parameters that it doesn't use.
        for parameter, gradient in zip(self._parameters, own, strict=True):
            parameter.grad = gradient

    def _parts(self, vector: Tensor) -> list[Tensor]:
        """Return the views of the parameters in a vector of gradients, complex ones as real."""
        shapes = [as_real(each).shape for each in self._parameters]
        parts = torch.split(vector[:-MARKS], [shape.numel() for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def mark(version: int) -> float:
    """Return the mark of a version, at least 1."""
    return float(version % DIFFERENT_MARKS + 1)


def _like(own: Tensor | None, mean: Tensor, parameter: Tensor) -> Tensor | None:
    """Return a mean gradient in the form of this worker's ``own``.

    A parameter that has no gradient in any part of the batch gets none, and rows that no sample
    uses are not in a sparse one.
    """
    if own is None and not mean.any():
        return None
    mean = torch.complex(*mean.unbind(-1)) if parameter.is_complex() else mean
    gradient = mean.to(parameter, copy=True)
    if own is None or not own.is_sparse:
        return gradient
    rows = gradient.flatten(1).any(1).nonzero().T
    values, shape = gradient[rows[0]], gradient.shape
    return torch.sparse_coo_tensor(rows, values, shape, is_coalesced=True, check_invariants=False)


def _set_since(optimizer: Optimizer, settings: Sequence[State]) -> list[State]:
    """Return the settings of each group that differ from ``settings``, which are earlier ones."""
    present = settings_of(optimizer)
    # Groups that were added since have none.
    then: list[State] = [*settings, *[{}] * (len(present) - len(settings))]
    return [
        {name: value for name, value in group.items()
         if name not in fields or not _equal(value, fields[name])}
        for group, fields in zip(present, then, strict=True)
    ]  # fmt: skip


def _equal(one: Any, other: Any) -> bool:
    are_tensors = isinstance(one, Tensor), isinstance(other, Tensor)
    if any(are_tensors):
        return all(are_tensors) and torch.equal(one, other)
    try:
        return bool(one == other)
    except (RuntimeError, ValueError):  # A list of tensors or arrays, which the step itself makes.
        return True


def _step_of(optimizer: Optimizer) -> Callable[[Optimizer], Any]:
    """Return the ``step`` of an optimizer's class without the hooks, which count a loop's steps."""
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]

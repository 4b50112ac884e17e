"""Loader for a loop that makes its own steps: a plain one, or one with Accelerate.

Hooks of the optimizer see the steps, so the loop needs no calls of the session.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from operator import length_hint
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from vcasgd.errors import NonFiniteLoss, SpecError, UserCodeError
from vcasgd.learning.optimizers import gradient_first, parts_of, reevaluates, trained_by
from vcasgd.learning.precision import MAX_SKIPPED
from vcasgd.learning.rates import clip, set_options
from vcasgd.learning.stream_shards import is_stream
from vcasgd.learning.training import to_device
from vcasgd.learning.training_set import check_indexed, data_of
from vcasgd.session.launch import (
    accumulation_steps,
    check_launch,
    seen_by_accelerate,
)
from vcasgd.session.schedules import LoopSchedulers, check_rates, learning_rates
from vcasgd.session.script import LoopInThread, LoopTask, running_script
from vcasgd.session.watch import unwatched, watch
from vcasgd.task.loop_code import changes_after, count_loops, rates_of_epochs
from vcasgd.task.place import Place


class BatchLoader:
    """Iterable over the batches of a data set, on the model's device.

    On its own, it yields the batches of ``loader``, one epoch for each iteration. In a job, these
    are batches of the worker's leases. In a loop over epochs, an iteration ends with the worker's
    last batch of an epoch. The script ends at its present batch, when the job does. It is no
    ``DataLoader``, so ``Accelerator.prepare`` returns it as it is and reads no batch ahead.

    With ``accumulation`` above 1, each step of the optimizer has the gradients of so many batches.
    Workers share the samples of a step, so it can have fewer batches in a job: a loop asks
    :attr:`ends_step`, as Accelerate does.
    """

    #: Samples that were added to the last batch, for Accelerate: unknown.
    remainder = -1
    #: Remedy for a batch without a step.
    step_remedy = (
        "make one step for each batch of session.loader, with an optimizer that the Session got: "
        "give it the one that a wrapper steps, and one of all parameters instead of making another "
        "later; to accumulate gradients, pass gradient_accumulation_steps and make a "
        "step if ends_step of the loader is True"
    )

    def __init__(
        self,
        task: LoopTask,
        optimizer: Optimizer,
        loader: DataLoader[Any] | None,
        script: LoopInThread | None,
        accumulation: int = 1,
    ) -> None:
        self._task, self._optimizer, self._loader, self._script = task, optimizer, loader, script
        if loader is not None:
            #: Those of the loader that was given.
            self.dataset, self.sampler = loader.dataset, loader.sampler
            self.batch_size = loader.batch_size
        self._accumulation = accumulation
        self._ends_step = True
        #: True until the present batch has the step of the optimizer that it needs.
        self._lacks_step = False
        self._steps = 0
        #: Steps in a row that a scaler of gradients skipped.
        self._skipped = 0
        #: True if their steps are watched until the job's end.
        self._is_hooked = False
        #: The optimizers that a loop steps, and those that it has stepped for the present batch.
        self._parts = parts_of(optimizer)
        #: Calls of ``step`` that haven't returned: that of a class calls that of its base.
        self._calls = 0
        self._stepped: list[Optimizer] = []
        #: Sum of the losses of the present batch, and the factor of its gradient.
        self._loss: Tensor | None = None
        self._weight = 1.0
        #: First scalar that the loop passed to ``torch.autograd.grad`` for the present batch.
        self._differentiated: Tensor | None = None
        #: The last loss that was scaled, after and before, and what returns its factor.
        self._scaled: tuple[Tensor, Tensor, Callable[[], float]] | None = None
        #: Returns the factor of the gradients that were computed last.
        self._scale: Callable[[], float] = lambda: 1.0
        #: Learning rates of each optimizer in the present step of a job.
        self._rates: list[list[Any]] = []
        #: True if an iteration in a job is an epoch, which is the last one that was started.
        self._by_epoch = True
        self._epoch = -1
        #: Frame that runs the loop over the batches; None before its first batch.
        self._frame: FrameType | None = None
        #: Mean loss of the present step in a job; None without a step.
        self._mean: float | None = None
        self._schedulers: LoopSchedulers | None = None
        if script is not None:
            script.finish = self._finish

    def __len__(self) -> int:
        """Return the number of batches of an epoch on one machine."""
        assert self._loader is not None, "not of another library"
        return len(self._loader)

    @property
    def ends_step(self) -> bool:
        """True if the optimizer's step follows the present batch, because it is the last one whose
        gradient the step has."""
        return self._ends_step

    #: Name that Accelerate uses.
    end_of_dataloader = ends_step

    def __iter__(self) -> Iterator[Any]:
        """Yield batches, with a step of the optimizer after each that :attr:`ends_step`.

        Without gradients (``torch.no_grad``), it yields all batches of ``loader``, without steps.
        Raises :class:`SpecError` for a launch that a job can't follow, and :class:`UserCodeError`
        if a step is missing.
        """
        if self._loader is not None and not torch.is_grad_enabled():
            # A pass that only evaluates, such as that of torch's update_bn.
            return (to_device(batch, self._device) for batch in self._loader)
        check_launch()
        self._follow_accelerate()
        script = self._script
        if script is not None and not script.started:
            # Without a loop over epochs, one over batches covers all of them.
            self._frame = sys._getframe(1)
            self._by_epoch = count_loops(self._frame, script.folder) > 0
        return seen_by_accelerate(self, self._watched())

    def _watched(self) -> Iterator[Any]:
        with ExitStack() as stack:
            stack.enter_context(watch(self))
            self._hook_steps(stack)
            yield from self._batches_of_job(self._script) if self._script else self._local()

    def _hook_steps(self, stack: ExitStack) -> None:
        """Watch the steps of the optimizers; in a job, from the first epoch to the last.

        So they stay before the hooks of the worker, which need the gradients of a closure.
        """
        if self._is_hooked:
            return
        self._is_hooked = self._script is not None
        for part in self._parts:
            hooks = (
                part.register_step_pre_hook(self._before_step),
                part.register_step_post_hook(self._after_step),
            )
            if not self._is_hooked:
                for hook in hooks:
                    stack.callback(hook.remove)

    def _follow_accelerate(self) -> None:
        steps = accumulation_steps()
        if steps > 1 and self._accumulation not in (1, steps):
            raise SpecError(
                f"task: session.loader accumulates gradients over {self._accumulation} batches, "
                f"and the Accelerator over {steps}",
                remedy="leave gradient_accumulation_steps of the loader out",
                field="task",
            )
        self._accumulation = max(self._accumulation, steps)

    @property
    def _device(self) -> torch.device:
        assert self._task.network is not None, "a session has started"
        return next(self._task.network.parameters()).device

    def _local(self) -> Iterator[Any]:
        assert self._loader is not None, "not of another library"
        task, device = self._task, self._device
        task.passes += 1
        whole = ((each, True) for each in self._loader)
        batches = whole if self._accumulation == 1 else _with_end(self._loader)
        for number, (batch, is_last) in enumerate(batches, 1):
            self._begin(ends_step=is_last or number % self._accumulation == 0)
            task.starts_sequence = number == 1
            task.place = Place(0.0, task.steps_on_its_own, epoch=task.passes - 1)
            yield to_device(batch, device)
            self._check_stepped()
            task.steps_on_its_own += self._ends_step

    def _batches_of_job(self, script: LoopInThread) -> Iterator[Any]:
        if self._epoch >= 0:
            self._between_epochs()
        self.wait()
        self._epoch = max(self._epoch + 1, script.place.epoch)
        while script.place.epoch <= self._epoch or not self._by_epoch:
            if self._schedulers is not None:
                self._schedulers.begin_step()
            self._rates = learning_rates(self._optimizer)
            step, self._mean = script.batch, 0.0
            parts = step if self._accumulation > 1 else [(step, 1.0)]
            for number, (batch, share) in enumerate(parts, 1):
                # The loop divides each loss by the number of batches; their sizes may differ.
                self._begin(ends_step=number == len(parts), weight=share * self._accumulation)
                yield batch
                self._end_part()
            self.wait()
        self._rates = learning_rates(self._optimizer)
        if self._schedulers is not None:
            self._schedulers.end_epoch(self._epoch)

    def _end_part(self) -> None:
        self._check_stepped()
        check_rates(self._task, self._optimizer, self._rates)
        assert self._mean is not None
        self._mean += self._finite_loss()
        self._weight = 0.0

    def wait(self) -> None:
        """Submit the step that a job is waiting for, if any, and wait for the next batch."""
        script = self._script
        assert script is not None, "a job"
        if not script.started:
            self._start(script)
        elif self._mean is not None:
            if self._lacks_step and self._loss is None and self._mean == 0 and self._weight > 0:
                # The loop was left before it trained this batch, which comes again.
                return
            if self._weight:
                # The loop was left after its step.
                self._end_part()
            if self._schedulers is not None:
                self._schedulers.end_step()
            mean, self._mean = self._mean, None
            script.submit(torch.tensor(mean, dtype=torch.float64))

    def _finish(self) -> None:
        """Submit the last step of a loop that ends by itself, if it made one for the batch."""
        assert self._script is not None, "a job"
        if self._script.started and self._ends_step and not self._lacks_step:
            self.wait()

    def _start(self, script: LoopInThread) -> None:
        task = self._task
        if task.user_schedule is None and task.scheduled is None:
            self._watch_schedulers()
        task.makes_steps = True
        task.accumulate(self._accumulation)
        script.start()

    def _watch_schedulers(self) -> None:
        assert self._script is not None, "a job"
        loader = self._loader
        # A batch sampler may have no length.
        batches = 0 if loader is None or is_stream(loader.dataset) else length_hint(loader)
        frame = self._frame if self._by_epoch else None
        rates_of = partial(rates_of_epochs, frame, self._script.folder)
        steps = -(-batches // self._accumulation)
        self._schedulers = LoopSchedulers(self._parts, steps, rates_of)
        self._task.scheduled = self._schedulers.options
        if code := self._schedulers.epoch_rates:
            self._task.repeated_code = code.statements

    def _begin(self, *, ends_step: bool, weight: float = 1.0) -> None:
        self._lacks_step = self._ends_step = ends_step
        self._loss, self._weight = None, weight * self._task.loss_factor
        self._stepped, self._calls, self._differentiated = [], 0, None

    def _check_stepped(self) -> None:
        if self._stepped and self._task.sets_rates:
            # The loop may have read the job's step after one of its own.
            self._lacks_step = False
        if self._lacks_step and self._stepped:
            raise UserCodeError(
                "a batch ended without a step of each optimizer",
                remedy="for one that steps less often, decide by session.global_step: a worker has "
                "only some of the batches",
            )
        if not self._lacks_step:
            return
        is_sound = self._loss is not None and bool(torch.isfinite(self._loss))
        if self._task.skips_bad_samples or (self._script is None and not is_sound):
            # The loop skips a batch that it finds bad, as the job may.
            self._loss = torch.tensor(math.nan)
            return
        raise UserCodeError(
            "a batch ended without optimizer.step of the session's optimizer",
            remedy=f"{self.step_remedy}; to leave bad batches out, set on_bad_sample: skip in the "
            "job file",
        )

    # -- losses --------------------------------------------------------------------------------

    def note_scaled(self, scaled: Tensor, loss: Tensor, scale: Callable[[], float]) -> None:
        self._scaled = scaled, loss, scale

    def weighted(self, loss: Tensor) -> Tensor:
        """Record a loss of the present batch, which ``backward`` is called for.

        Returns the loss whose gradient is to be computed.
        """
        scaled, self._scaled = self._scaled, None
        unscaled, self._scale = loss, lambda: 1.0
        if scaled is not None and loss is scaled[0]:
            _, unscaled, self._scale = scaled
        part = unscaled.detach() * self._weight
        # Others in a step are of the same batch.
        if self._loss is None or not self._calls:
            self._loss = part if self._loss is None else self._loss + part
        return loss if self._weight == 1 else loss * self._weight

    def note_differentiated(self, outputs: Any) -> None:
        """Remember a scalar whose gradient the loop computes, which may be its loss."""
        if self._differentiated is None and isinstance(outputs, Tensor) and outputs.numel() == 1:
            self._differentiated = outputs.detach()

    def _finite_loss(self) -> float:
        if self._loss is None and self._weight == 1:
            # The loop sets the gradients itself.
            self._loss = self._differentiated
        if self._loss is None and self._task.skips_bad_samples:
            # The loop leaves the batch out.
            self._loss = torch.tensor(math.nan)
        if self._loss is None:
            raise UserCodeError(
                "a batch has no loss, because neither loss.backward nor torch.autograd.grad was "
                "called for it",
                remedy="call one of them for each batch, and not torch.func, because a job records "
                "the loss; to leave bad batches out, set on_bad_sample: skip in the job file",
            )
        value = float(self._loss)
        if not math.isfinite(value) and not self._task.skips_bad_samples:
            raise NonFiniteLoss(
                f"the loss is {value} in local step {self._steps}",
                remedy="lower the learning rate, clip gradients, or check the data for NaN",
                step=self._steps,
            )
        return value

    def clip(
        self, parameters: list[Tensor], now: Callable[[float], None], again: Callable[[], None]
    ) -> None:
        """Clip gradients of a part of a batch, whose norm is larger, by ``now(factor)``.

        ``again()`` clips those of the whole batch later, if its mean gradient is known.
        """
        self._task.clips_itself = True
        clips, factor = self._task.loop_clips, self._task.clip_factor
        if clips is None:
            now(factor)
        else:
            clips.clip(parameters, partial(now, factor), again)

    def expect_changes(self, frame: FrameType) -> None:
        """Note the gradients that a call of ``frame`` has computed, if the loop changes them."""
        clips = self._task.loop_clips
        if clips is None:
            return
        changes, hooks = changes_after(frame), self._task.changes_of_hooks
        clips.scale = self._scale
        parameters = trained_by(self._optimizer)
        clips.expect(parameters, changes or hooks, clips_follow=changes is None)

    # -- steps of the optimizer ----------------------------------------------------------------

    def makes_steps_of(self, optimizer: Optimizer) -> bool:
        return set(parts_of(optimizer)) <= set(self._parts)

    def end_scaled_step(self, *, overflows: bool) -> None:
        """Count a step that a scaler of gradients made, or skipped because a gradient overflows.

        A skipped step counts as trained, as in a plain loop. Raises :class:`NonFiniteLoss` if a
        job skips too many in a row.
        """
        self._skipped = self._skipped + 1 if overflows else 0
        if overflows and self._lacks_step:
            self._count_step()
            self._lacks_step = False
        if self._script and self._skipped > MAX_SKIPPED:
            raise NonFiniteLoss(
                f"the scaler of gradients skipped {self._skipped} steps in a row",
                remedy="use bf16, lower the learning rate, or check the loss for a division by 0",
                step=self._steps,
            )

    @property
    def _is_made_again(self) -> bool:
        """True if the worker makes a step again, whose base class has these hooks, too."""
        return self._script is not None and running_script() is not self._script

    def _before_step(self, optimizer: Optimizer, args: Any, options: Any) -> Any:
        if self._is_made_again:
            return None
        if self._calls and self._stepped[-1] is optimizer:
            self._calls += 1
            return None
        present = gradient_first(optimizer, args, options)
        self._calls = 1
        if optimizer in self._stepped:
            self._lacks_step = False
        elif self._stepped:
            self._stepped.append(optimizer)
            return present
        self._count_step()
        self._stepped.append(optimizer)
        if self._script and self._task.skips_bad_samples and self._loss is not None:
            self._drop_bad_step(self._optimizer)
        # A fused optimizer skips a step itself.
        may_overflow = hasattr(optimizer, "found_inf")
        task = self._task
        with unwatched():
            clip(task, self._optimizer, self._steps, task.clip_factor, may_overflow=may_overflow)
        return present

    def _drop_bad_step(self, optimizer: Optimizer) -> None:
        """Make an optimizer's step change nothing if the loss or the gradient isn't finite."""
        gradients = [each.grad for each in trained_by(optimizer) if each.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        assert self._loss is not None, "the loss was checked"
        if not bool(torch.isfinite(norm.cpu() + self._loss.cpu())):
            # The worker skips the batch for such a loss.
            self._loss = torch.tensor(math.nan)
            optimizer.zero_grad(set_to_none=True)

    def _count_step(self) -> None:
        if not self._lacks_step:
            raise UserCodeError(
                "optimizer.step was called twice for one batch, without a batch, or before the "
                "last batch of a step",
                remedy="call it once for each batch of session.loader; if the loop accumulates "
                "gradients, once if ends_step of the loader is True, or in accelerator.accumulate",
            )
        self._steps += 1
        if self._script:
            check_rates(self._task, self._optimizer, self._rates)
            if self._loss is not None or not reevaluates(self._optimizer):
                self._finite_loss()

    def _after_step(self, *_: Any) -> None:
        if self._is_made_again:
            return
        self._calls -= 1
        if self._calls:
            return
        # A loop that knows the job's step may step some optimizers less often.
        self._lacks_step = len(self._stepped) < len(self._parts) and not self._task.sets_rates

    def _between_epochs(self) -> None:
        """Undo what the loop has done to the rates between two epochs, if that is replayed."""
        if self._schedulers is None or not self._schedulers.epoch_rates:
            check_rates(self._task, self._optimizer, self._rates)
            return
        for part, rates in zip(self._parts, self._rates, strict=True):
            # Those of groups that the loop has added are their own.
            for group, rate in zip(part.param_groups, rates, strict=False):
                set_options(group, {"lr": rate} if "lr" in group else {})


def _with_end(batches: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Yield batches, read one ahead, each with True if it is the last one."""
    iterator = iter(batches)
    for batch in iterator:
        for following in iterator:
            yield batch, False
            batch = following
        yield batch, True


def loader_over(data: Dataset[Any] | DataLoader[Any], batch_size: int | None) -> DataLoader[Any]:
    """Return a shuffled loader over a data set, or a given one, with ``batch_size`` if not None.

    Raises :class:`SpecError` for data whose samples have no numbers, or whose batches have sizes of
    their own.
    """
    if not isinstance(data, DataLoader):
        shuffle = not is_stream(data)
        if shuffle:
            check_indexed(data)
        return DataLoader(data, batch_size or LoopTask.batch_size, shuffle=shuffle)
    if batch_size in (None, data.batch_size):
        return data
    given = data_of(data, batch_size)
    return DataLoader(
        *(given.dataset, given.batch_size),
        sampler=given.sampler,
        drop_last=getattr(data.batch_sampler, "drop_last", False),
        collate_fn=given.collate,
        num_workers=data.num_workers,
        prefetch_factor=data.prefetch_factor,
        pin_memory=data.pin_memory,
        worker_init_fn=data.worker_init_fn,
    )

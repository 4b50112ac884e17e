"""Schedulers of torch, followed along the steps of a job.

A scheduler changes the options of an optimizer at each of its own steps. In a job, a worker makes
steps at any place, so the schedulers are replayed: from the first step of the job on, each time
that the training would have called them, while the optimizer has the options of the replay. What
they change, be it rates, momenta, or weight decay of any group, is a function of the job's step.
"""

from __future__ import annotations

import copy
import gc
import logging
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from vcasgd.errors import SpecError, UserCodeError
from vcasgd.learning.optimizers import parts_of
from vcasgd.learning.rates import set_options
from vcasgd.task.loop_code import EpochRates
from vcasgd.task.place import Place
from vcasgd.task.task import Task

log = logging.getLogger(__name__)

#: Options of one optimizer's groups, or of several optimizers'.
Options = list[dict[str, Any]]
#: Last steps whose options a replay keeps. An earlier one starts it again.
KEPT = 20_000


class Replay:
    """Options that ``schedulers`` set, for each step of a job.

    ``advance(step)`` makes the calls that the training makes after its ``step``, counted from 0.
    ``first`` are the options of the first step, by default the present ones. The optimizers keep
    their present options. Raises :class:`SpecError` for a scheduler that follows a metric.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[Any],
        advance: Callable[[int], None],
        first: Options | None = None,
    ) -> None:
        for each in schedulers:
            check_scheduler(each)
        self._optimizers = optimizers
        self._schedulers, self._advance = list(schedulers), advance
        self._states = [copy.deepcopy(each.state_dict()) for each in schedulers]
        self._first = first or options_of(optimizers)
        #: Names of the options that were changed so far.
        self._names: set[str] = {"lr"}
        self.restart()

    def at(self, step: int) -> Options:
        """Return the options that schedulers have changed, for each group, at a step from 0.

        Raises :class:`UserCodeError` for an optimizer with more groups than at first.
        """
        if sum(len(each.param_groups) for each in self._optimizers) != len(self._first):
            raise UserCodeError(
                "a group of parameters was added to an optimizer with a scheduler, which a worker "
                "that joins later can't repeat",
                remedy="give the optimizer all groups from the start, also while their parameters "
                "are frozen",
            )
        if step < self._made - len(self._kept) + 1:
            self.restart()
        while self._made < step:
            self._make()
        kept = self._kept[step - self._made - 1]
        # What was changed only later still had its first value.
        return [
            {name: first[name] for name in self._names & first.keys()} | each
            for first, each in zip(self._first, kept, strict=True)
        ]

    def restart(self) -> None:
        for scheduler, state in zip(self._schedulers, self._states, strict=True):
            scheduler.load_state_dict(copy.deepcopy(state))
        self._made, self._present = 0, self._first
        self._kept = deque([self._changed()], KEPT)

    def _changed(self) -> Options:
        return [{name: each[name] for name in self._names & each.keys()} for each in self._present]

    def _make(self) -> None:
        # Loading its state gives an optimizer new groups.
        groups = [group for each in self._optimizers for group in each.param_groups]
        before = [_options(group) for group in groups]
        try:
            _set(groups, self._present)
            with warnings.catch_warnings():
                # torch expects a step of the optimizer first.
                warnings.simplefilter("ignore")
                self._advance(self._made)
            after = [_options(group) for group in groups]
        finally:
            _set(groups, before)
        for old, new in zip(self._present, after, strict=True):
            self._names |= {name for name in new if old.get(name) != new[name]}
        self._made, self._present = self._made + 1, after
        self._kept.append(self._changed())


_SOME_STEPS = (
    "never, or after some steps or epochs only, so that no function of the job's step is known"
)
#: Steps of a loop in which each scheduler that it calls after steps has to be called. Later, a loop
#: may be done with one.
_WATCHED_STEPS = 50


class LoopSchedulers:
    """Schedulers of ``optimizers`` that a loop steps itself, after each of its steps or epochs.

    In a job, its calls are noted and replayed, because they count the steps of one worker.
    ``epoch_steps`` are those of the loop on one machine, or 0 for those of the job, which may be
    others: a loader can drop the last batch. ``rates_of`` returns the code that sets rates between
    epochs, by some of the schedulers, which is replayed as well. Raises :class:`SpecError` for a
    scheduler that follows a metric, and what ``rates_of`` raises.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        epoch_steps: int,
        rates_of: Callable[[Sequence[Any]], EpochRates | None],
    ) -> None:
        self._optimizers, all_found = optimizers, schedulers_of(optimizers)
        for each in all_found:
            check_scheduler(each)
        #: Code that sets rates between epochs, while this replays it.
        self.epoch_rates, self._is_replaying = rates_of(all_found), False
        #: Schedulers that it steps.
        self._in_code = [*self.epoch_rates.schedulers] if self.epoch_rates else []
        self._found = [one for one in all_found if all(one is not each for each in self._in_code)]
        self._loop_epoch_steps = epoch_steps
        self._own_steps = [each.step for each in self._found]
        #: True for each scheduler that the loop calls after its epochs; None until that is known.
        self._by_epoch: list[bool | None] = [None] * len(self._found)
        self._steps, self._between, self._place = 0, False, Place(0.0)
        #: True in the last step of an epoch, and after the first epoch of the job that has it.
        self._is_last = self._first_ends = False
        #: Schedulers that it has called since the last step.
        self._called: set[int] = set()
        self._first = options_of(optimizers)
        self._replay: Replay | None = None
        for number, each in enumerate(self._found):
            _replace_step(each, partial(self._note, number))
        for each in self._in_code:
            _replace_step(each, partial(self._step_of_code, each.step))

    def begin_step(self) -> None:
        """Record that the loop gets the batch of its next step."""
        known = list(enumerate(self._by_epoch))
        expected = {number for number, each in known if each is False}
        if self._steps > _WATCHED_STEPS:
            expected = set()
        if self._first_ends:
            expected |= {number for number, each in known if each}
        if expected - self._called:
            raise _refused(_SOME_STEPS)
        self._called.clear()
        self._steps, self._between, self._first_ends = self._steps + 1, False, False
        self._is_last = self._place.batch + 1 == self._place.epoch_steps

    def end_step(self) -> None:
        """Record that the loop has ended its step: it would have called the schedulers by now."""
        self._by_epoch = [each is not False for each in self._by_epoch]

    def end_epoch(self, epoch: int) -> None:
        """Record that the loop over the batches of an epoch, counted from 0, ends."""
        self._between, self._first_ends = True, epoch == 0 and self._is_last

    def options(self, place: Place) -> Options | None:
        """Return the options of all groups at a place of the job; None without schedulers."""
        if not self._found and not self.epoch_rates:
            return None
        self._place = place
        if self._replay is None:
            known = None not in self._by_epoch
            self._replay = self._new_replay([bool(each) for each in self._by_epoch])
            if known:
                self._check_length(place)
            else:
                # The first step of a new worker; the loop hasn't called its schedulers yet.
                return self._lower(place.step)
        return self._replay.at(place.step)

    def _check_length(self, place: Place) -> None:
        """Compare the lengths of schedulers with that of the job.

        Raises :class:`SpecError` if one fails before the last step of the job.
        """
        epochs, rest = divmod(place.steps - 1, place.epoch_steps)
        own = self._loop_epoch_steps or place.epoch_steps
        for scheduler, by_epoch in zip(self._found, self._by_epoch, strict=True):
            calls = epochs if by_epoch else epochs * own + min(rest, own)
            if isinstance(scheduler, OneCycleLR) and calls > scheduler.total_steps:
                raise SpecError(
                    f"task: OneCycleLR has {scheduler.total_steps} steps, and the job makes "
                    f"{calls + 1}",
                    remedy="give it the steps of as many epochs as the job file has",
                    field="task",
                )

            last, first = scheduler, 0
            if isinstance(scheduler, SequentialLR):
                last, first = scheduler._schedulers[-1], scheduler._milestones[-1]
            if isinstance(last, CosineAnnealingLR):
                # A loop calls it once more, after its last step.
                own_calls = calls + 1 - first
                if abs(last.T_max - own_calls) > max(1, own_calls // 100):
                    log.warning(
                        "CosineAnnealingLR has T_max %d and gets %d steps in this job, so its "
                        "lowest rate isn't the last one: give it the length of the job",
                        *(last.T_max, own_calls),
                    )

    def _lower(self, step: int) -> Options:
        """Return the options with the lower rate of calls after each step or each epoch."""
        assert self._replay is not None
        replays, self._replay = [self._replay, self._new_replay([True] * len(self._found))], None
        found = []
        for each in replays:
            found.append(each.at(step))
            each.restart()
        return min(found, key=lambda options: float(options[0].get("lr", 0.0)))

    def _new_replay(self, by_epoch: list[bool]) -> Replay:
        in_code: Callable[[], None] | None = None

        def advance(step: int) -> None:
            nonlocal in_code
            if step == 0 and self.epoch_rates:
                in_code = self.epoch_rates.replay()
            length = self._place.epoch_steps
            batch, own = step % length, self._loop_epoch_steps or length
            ends = batch + 1 == length
            calls = (own if ends else min(batch + 1, own)) - min(batch, own)
            for make, at_ends in zip(self._own_steps, by_epoch, strict=True):
                for _ in range(ends if at_ends else calls):
                    make()
            if ends and in_code:
                self._is_replaying = True
                try:
                    in_code()
                finally:
                    self._is_replaying = False

        schedulers = [*self._found, *self._in_code]
        return Replay(self._optimizers, schedulers, advance, self._first)

    def _step_of_code(self, step: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if self._is_replaying:
            step(*args, **kwargs)

    def _note(self, number: int, *args: Any, **kwargs: Any) -> None:
        if args or kwargs:
            raise _refused("with an argument, which counts steps or epochs of one worker")
        known = self._by_epoch[number]
        if known is None:
            self._by_epoch[number] = self._between
        elif known != self._between and not (known and self._is_last):
            raise _refused(_SOME_STEPS)
        self._called.add(number)


def schedulers_of(optimizers: Sequence[Optimizer]) -> list[Any]:
    """Return the schedulers of torch for these optimizers, without those that are parts of others.

    torch keeps no list of them, so they are searched among Python's objects. One can have a wrapper
    of an optimizer, which has the same groups.
    """
    owned = {id(group) for each in optimizers for group in each.param_groups}
    found = [
        each
        for each in gc.get_objects()
        if issubclass(type(each), LRScheduler)
        and owned & {*map(id, getattr(getattr(each, "optimizer", None), "param_groups", ()))}
    ]
    parts = {id(part) for each in found for part in getattr(each, "_schedulers", ())}
    return [each for each in found if id(each) not in parts]


def ignore_steps(scheduler: LRScheduler) -> None:
    """Let calls of a loop change nothing, because the session follows the scheduler."""
    _replace_step(scheduler, lambda *_, **__: None)


def learning_rates(optimizer: Optimizer) -> list[list[Any]]:
    """Return the present rates of the groups of each optimizer that this one stands for."""
    rates = [[group.get("lr") for group in each.param_groups] for each in parts_of(optimizer)]
    return [[float(r) if isinstance(r, torch.Tensor) else r for r in each] for each in rates]


def check_rates(task: Task, optimizer: Optimizer, before: list[list[Any]]) -> None:
    """Raise :class:`UserCodeError` if a loop that may not has changed the rates of ``before``."""
    # Groups that the loop has added come after the others, with rates of their own.
    pairs = zip(learning_rates(optimizer), before, strict=False)
    if not task.sets_rates and any(now[: len(rates)] != rates for now, rates in pairs):
        raise UserCodeError(
            "the loop changed the learning rate, which a job sets for each step",
            remedy="pass schedule=… to the session, a factor for each progress, or compute the "
            "rate for each batch from session.global_step or session.epoch",
        )


def check_scheduler(scheduler: Any) -> None:
    if isinstance(scheduler, ReduceLROnPlateau):
        raise SpecError(
            "task: ReduceLROnPlateau can't be used: a step must have the same rate on any worker",
            remedy="use a scheduler whose rate depends on the step only",
            field="task",
        )


def schedule_of(
    schedule: Callable[[float], float] | LRScheduler | None, steps: int | None, *, in_job: bool
) -> Callable[[Place], Options] | None:
    """Return the options of all groups at a place of the job, for a scheduler of torch.

    It makes ``steps`` steps in the whole job, whose loop needn't call it. None if it is a function
    or None. Raises :class:`SpecError` for a scheduler without its number of steps.
    """
    if not isinstance(schedule, LRScheduler):
        return None
    if not steps:
        raise SpecError(
            "task: the session needs the number of its scheduler's steps",
            remedy="pass schedule_steps, all steps that the scheduler makes",
            field="task",
        )
    step = schedule.step
    replay = Replay([schedule.optimizer], [schedule], lambda _: step())
    if in_job:
        ignore_steps(schedule)
    return lambda place: replay.at(int(place.progress * steps))


def _refused(how: str) -> UserCodeError:
    return UserCodeError(
        f"the loop calls the step of its scheduler {how}",
        remedy="call it without an argument after each step, with lengths that count steps, or "
        "after each epoch (a Lightning module can ask trainer.is_last_batch); or pass it to the "
        "session: Session(model, optimizer, schedule=scheduler, schedule_steps=…)",
    )


def _replace_step(scheduler: Any, step: Callable[..., None]) -> None:
    """Give a scheduler another ``step``, which isn't in the state that a loop stores."""
    own, replaced = scheduler.state_dict, ("step", "state_dict")

    def state_dict() -> dict[str, Any]:
        return {name: value for name, value in own().items() if name not in replaced}

    vars(scheduler).update(step=step, state_dict=state_dict)


def options_of(optimizers: Sequence[Optimizer]) -> Options:
    return [_options(group) for each in optimizers for group in each.param_groups]


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: float(value) if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name != "params"
    }


def _set(groups: Iterable[dict[str, Any]], options: Iterable[Mapping[str, Any]]) -> None:
    for group, present in zip(groups, options, strict=True):
        set_options(group, present)

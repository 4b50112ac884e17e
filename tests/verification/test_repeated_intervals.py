"""Intervals that another learner repeats from bytes: exactly the same update, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from support.repeated import OPTIMIZERS, Machine, Noisy
from torch import Tensor
from torch.optim import SGD

import vcasgd
from vcasgd.store.tensors.snapshot import RoundFacts
from vcasgd.verification.judge import update_difference
from vcasgd.verification.state import (
    FRESH,
    LearnerState,
    MalformedState,
    NotRepeatable,
)
from vcasgd.verification.verifier import (
    IntervalFacts,
    RepeatingLearner,
    WrongInterval,
    state_of,
)
from vcasgd.worker.interval import Base, Trained

Vectors = tuple[Tensor, Tensor]


def repeated(
    own: Machine, facts: IntervalFacts, base: Vectors, before: LearnerState
) -> tuple[Trained, LearnerState]:
    """Repeat an interval from the bytes of a state; return its update, and the state after it."""
    repeating = RepeatingLearner(own.learner)
    again = repeating.repeat(facts, base, repeating.format.parse(before.to_bytes()))
    return again, state_of(repeating)


def machines(task: Callable[[], Noisy] = Noisy, **fields: Any) -> tuple[Machine, Machine]:
    """Return a volunteer's machine, and one of one's own that has trained something else."""
    volunteer, own = (Machine(task(), subtask=number, **fields) for number in range(2))
    own.interval()
    return volunteer, own


@pytest.mark.parametrize("rule", ["rounds", "async-local-sgd"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.ci
def test_a_repetition_is_the_same_to_the_last_bit(name: str, rule: str) -> None:
    # Given two machines, of which one has trained something else
    fields = {"update": {"rule": rule}, "optimizer_state": "keep"}
    volunteer, own = machines(lambda: Noisy(OPTIMIZERS[name]), **fields)
    last = None
    for _ in range(3):
        base = volunteer.base
        before, trained, after, facts = volunteer.interval()
        # The states of successive intervals fit together
        assert last is None or before.digest == last
        last = after.digest

        # When it repeats the interval
        again, state = repeated(own, facts, base, before)

        # Then it gets the same update and the same state
        assert torch.equal(again.update, trained.update)
        assert torch.equal(again.integers, trained.integers)
        assert after.difference(state) == 0.0
        assert state.digest == after.digest
        volunteer.move(trained)


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_a_repetition_follows_a_changed_share_of_the_batch(name: str) -> None:
    volunteer, own = machines(lambda: Noisy(OPTIMIZERS[name]))
    _, trained, last, _ = volunteer.interval()
    volunteer.move(trained)
    member = volunteer.learner.member
    assert member is not None
    share = member.share
    member.measure(step_seconds=0.01)
    # When others have left, so that this one's part of the batch grows
    facts_of_round = RoundFacts(workers=3, batch=0.7 * member.batch / share)
    member.follow(Base(*volunteer.base, version=1, round=facts_of_round))
    assert member.share > share, "its part has grown"
    base = volunteer.base
    before, trained, after, facts = volunteer.interval()
    assert before.digest == last.digest

    again, state = repeated(own, facts, base, before)

    parameters = volunteer.learner.layout.parameters
    assert update_difference(trained.update, again.update, base[0], parameters) < 1e-6
    assert after.difference(state) < 1e-6


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_the_own_training_is_the_same_to_the_last_bit(name: str) -> None:
    # Given two equal machines, of which one also repeats an interval of a third one
    make = OPTIMIZERS[name]
    own, twin, volunteer = (Machine(Noisy(make), subtask=n) for n in (1, 1, 3))
    for each in (own, twin):
        each.move(each.interval()[1])
    before, _, _, facts = volunteer.interval()
    repeated(own, facts, volunteer.base, before)

    # When both go on
    one, two = own.interval(), twin.interval()

    # Then nothing differs
    assert torch.equal(one[1].update, two[1].update)
    assert (one[0].digest, one[2].digest) == (two[0].digest, two[2].digest)


def test_an_interval_that_was_cut_short_is_repeated_up_to_there() -> None:
    volunteer, own = machines(push_every=4)
    base = volunteer.base
    before, trained, after, facts = volunteer.interval(most=2)
    assert facts.stop < facts.planned

    again, state = repeated(own, facts, base, before)

    assert torch.equal(again.update, trained.update)
    assert after.difference(state) == 0.0


def test_an_interval_after_a_rollback_has_smaller_steps() -> None:
    volunteer, own = machines()
    volunteer.interval()
    volunteer.rollbacks = 1
    base = volunteer.base
    _, trained, after, facts = volunteer.interval()

    fresh = LearnerState(after.format, {})
    again, state = repeated(own, facts, base, fresh)

    assert torch.equal(again.update, trained.update)
    assert after.difference(state) == 0.0
    assert fresh.digest == FRESH


@pytest.mark.parametrize(("push", "least", "most"), [(0.0, 0.0, 0.0), (0.3, 0.29, 0.31)])
def test_a_pushed_momentum_differs(push: float, least: float, most: float) -> None:
    volunteer, own = machines()
    volunteer.move(volunteer.interval()[1])
    base = volunteer.base
    before, _, after, facts = volunteer.interval()
    momenta = list(after.tensors.values())
    whole = sum(float(each.square().sum()) for each in momenta) ** 0.5
    momenta[0].view(-1)[0] += push * whole

    _, state = repeated(own, facts, base, before)

    assert least <= after.difference(state) <= most


def test_a_wrong_base_shows_in_the_update() -> None:
    volunteer, own = machines()
    floats, integers = volunteer.base
    before, trained, _, facts = volunteer.interval()

    again, _ = repeated(own, facts, (floats + 0.3, integers), before)

    parameters = own.learner.layout.parameters
    assert update_difference(trained.update, again.update, floats, parameters) > 0.1


# -- bytes that aren't trusted -----------------------------------------------------------------


def _save(**changed: Tensor | None) -> Callable[[dict[str, Tensor]], bytes]:
    """Return a function that changes tensors of the first parameter, and writes the state."""

    def write(tensors: dict[str, Tensor]) -> bytes:
        for name, tensor in changed.items():
            if tensor is None:
                del tensors[f"0.{name}"]
            else:
                tensors[f"0.{name}"] = tensor
        return bytes(save(tensors))

    return write


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda _: b"", "can't be read"),
        (lambda _: b"\xff" * 1000, "can't be read"),
        (lambda tensors: save(tensors)[:-1], "can't be read"),
        (lambda tensors: save(tensors) + b"x", "can't be read"),
        (lambda tensors: save({**tensors, "9.step": torch.ones(())}), "not those of this model"),
        (lambda tensors: save({**tensors, "00.step": torch.ones(())}), "not those of this model"),
        (_save(other=torch.ones(6, 4)), "not those of this model"),
        (_save(step=None), "lacks some"),
        (_save(exp_avg=torch.ones(4, 6)), "another type or shape"),
        (_save(exp_avg=torch.ones(6, 4).double()), "another type or shape"),
        (_save(step=torch.ones(1)), "another type or shape"),
        (_save(exp_avg=torch.full((6, 4), torch.nan)), "exp_avg is not finite"),
        (_save(exp_avg_sq=torch.full((6, 4), torch.inf)), "exp_avg_sq is not finite"),
        (_save(step=torch.tensor(-1.0)), "step is not a number of steps"),
        (_save(step=torch.tensor(1e30)), "step is not a number of steps"),
    ],
)
def test_malformed_bytes_are_refused(
    write: Callable[[dict[str, Tensor]], bytes], message: str
) -> None:
    machine = Machine(Noisy(OPTIMIZERS["adam"]), update={"rule": "async-local-sgd"})
    machine.interval()
    state = state_of(machine.learner)
    data = write(load(bytes(state.to_bytes().numpy())))

    with pytest.raises(MalformedState, match=message):
        state.format.parse(torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else
                           torch.empty(0, dtype=torch.uint8))  # fmt: skip


def test_a_state_is_no_larger_than_its_format_allows() -> None:
    for make in OPTIMIZERS.values():
        machine = Machine(Noisy(make))
        machine.interval()
        state = state_of(machine.learner)
        assert len(state.to_bytes()) <= state.format.max_bytes


@pytest.mark.parametrize(
    "changes",
    [
        {"subtask": 99},
        {"start": 8, "stop": 8},
        {"planned": 1000},
        {"batch": 0.0},
        {"batch": 1e9},
        {"stop": 3},
    ],
)
def test_an_interval_that_no_worker_trains_is_refused(changes: dict[str, Any]) -> None:
    machine = Machine(Noisy())
    base = machine.base
    before, _, _, facts = machine.interval()
    repeating = RepeatingLearner(machine.learner)

    with pytest.raises(WrongInterval):
        repeating.repeat(IntervalFacts(**{**vars(facts), **changes}), base, before)


class Scripted(Noisy):
    makes_steps = True


class Halved(Noisy):
    mixed_precision = "fp16"


@pytest.mark.parametrize(
    ("task", "message"), [(Scripted(), "is a script"), (Halved(), "fp16 rounds")]
)
def test_a_learner_whose_intervals_depend_on_more_is_named(task: vcasgd.Task, message: str) -> None:
    with pytest.raises(NotRepeatable, match=message):
        RepeatingLearner(Machine(task).learner)


class Factored(SGD):
    """Keeps a state of another shape than the parameter's, as Adafactor does."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each]["row"] = torch.zeros(each.shape[0] + 1)


def test_an_optimizer_with_another_state_is_named() -> None:
    machine = Machine(Noisy(lambda each: Factored(each, lr=0.1)))
    assert machine.learner.optimizer is not None
    machine.learner.optimizer.step()

    with pytest.raises(NotRepeatable, match="another shape"):
        RepeatingLearner(machine.learner)

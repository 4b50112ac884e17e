"""The volunteer's side of repetitions: what its updates name, and what it uploads."""

from __future__ import annotations

import torch
from support.repeated import OPTIMIZERS, Machine, Noisy

from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import TensorKeys
from vcasgd.verification.exchange import (
    WRONG_STATE,
    Claims,
    RepetitionExchange,
    RepetitionRequest,
)
from vcasgd.verification.recorder import StateRecorder
from vcasgd.verification.state import FRESH
from vcasgd.worker.interval import Base

JOB, WORKER = "job", "job.join-eve-1"
PLANNED = 8


class RecordedMachine(Machine):
    """A volunteer's machine, which names its updates by numbers."""

    def __init__(self, tensors: RedisClient, optimizer: str = "momentum") -> None:
        super().__init__(Noisy(OPTIMIZERS[optimizer]))
        self.recorder = StateRecorder(tensors, JOB, WORKER)
        self.number = 0

    def push(self) -> tuple[str, str]:
        """Train an interval; return what its update names."""
        self.recorder.serve(self.learner)
        self.recorder.begin(self.learner, Base(*self.base, self.rollbacks))
        self.move(self.interval()[1])
        self.number += 1
        text = self.recorder.end(self.learner, f"{WORKER}.1.{self.number}", PLANNED)
        claims = Claims.model_validate_json(text)
        assert claims.planned == PLANNED
        return claims.before, claims.after


def test_after_a_rollback_the_state_is_that_of_a_new_optimizer(tensors: RedisClient) -> None:
    machine = RecordedMachine(tensors)
    machine.push()
    machine.rollbacks = 1

    before, _ = machine.push()

    assert before == FRESH


def test_after_a_refused_update_the_worker_starts_with_a_new_optimizer(
    tensors: RedisClient,
) -> None:
    machine = RecordedMachine(tensors, "adam")
    machine.push()

    # When an update is refused for another reason, nothing changes
    machine.recorder.rejected("duplicate")
    assert machine.push()[0] != FRESH

    # When one is refused because its state isn't known
    machine.recorder.rejected(WRONG_STATE)

    # Then the next one starts from a state that needs no proof, once
    assert machine.push()[0] == FRESH
    assert machine.push()[0] != FRESH


def test_states_fit_together_and_those_of_the_last_two_updates_are_uploaded_once(
    tensors: RedisClient,
) -> None:
    machine = RecordedMachine(tensors)
    exchange = RepetitionExchange(tensors, TensorKeys(JOB))
    floats = torch.zeros(1)
    states = [machine.push() for _ in range(3)]
    assert states[0][0] == FRESH
    assert len({after for _, after in states}) == 3
    assert [before for before, _ in states[1:]] == [after for _, after in states[:-1]]

    def ask(number: int, worker: str = WORKER) -> RepetitionRequest:
        request = RepetitionRequest(
            id=f"{number:016x}", worker=worker, update=f"{WORKER}.1.{number}"
        )
        exchange.request(request, floats, floats)
        machine.recorder.serve(machine.learner)
        return request

    # The first one is gone, and requests to other workers are left alone
    assert exchange.answer(ask(1)) is None
    assert exchange.answer(ask(2, "job.join-bob-1")) is None

    # The last ones are here
    for number in (2, 3):
        request = ask(number)
        sizes = exchange.answer(request)
        assert sizes is not None
        assert sizes.before > 0
        # Nothing is uploaded again
        exchange.end(request, 1, sizes)
        exchange.request(request, floats, floats)
        assert not machine.recorder.serve(machine.learner)
        assert exchange.answer(request) is None


def test_a_learner_that_cant_be_repeated_names_no_state(tensors: RedisClient) -> None:
    machine = RecordedMachine(tensors)
    machine.learner.task.mixed_precision = "bf16"
    machine.recorder.begin(machine.learner, Base(*machine.base))
    machine.interval()

    assert machine.recorder.end(machine.learner, "u", PLANNED) == ""


def test_after_an_interval_that_failed_the_worker_starts_with_a_new_optimizer(
    tensors: RedisClient,
) -> None:
    machine = RecordedMachine(tensors)
    machine.push()

    # When an interval changes the optimizer, and never ends
    machine.recorder.begin(machine.learner, Base(*machine.base))
    machine.interval()

    # Then the next one starts from a state that needs no proof
    before = machine.push()[0]
    assert before == FRESH
    assert machine.push()[0] != FRESH

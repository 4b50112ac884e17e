"""Updates of volunteers that a shard has repeated, the workers that do it, and the consequences."""

from __future__ import annotations

import hashlib

import pytest
import torch
from support.world import MakeWorld

from vcasgd.parameter_server import reports
from vcasgd.parameter_server import shard as shard_module
from vcasgd.store.ledger.placement import Owners
from vcasgd.store.tensors.header import Header
from vcasgd.verification import repetitions as module
from vcasgd.verification.exchange import (
    MAX_ANSWER_LENGTH,
    Claims,
    RepetitionExchange,
    RepetitionRequest,
    RepetitionResult,
    RepetitionTask,
)
from vcasgd.verification.repetitions import MAX_ATTEMPTS, MAX_LATER
from vcasgd.verification.state import FRESH

SAMPLES = 200


def digest(number: int) -> str:
    return hashlib.sha256(b"%d" % number).hexdigest()


class RepeatedWorld:
    """A job of one's own machines, and of volunteers, each of which pushes a sample at a time."""

    def __init__(self, make_world: MakeWorld) -> None:
        self.world = make_world(samples=SAMPLES, epochs=2, subtasks_per_epoch=SAMPLES // 2)
        self.exchange = RepetitionExchange(self.world.tensors, self.world.keys)
        self.shard = self.world.shard()
        self.workers = {owner: f"{self.world.job}.join-{owner}-1" for owner in ("bob", "eve")}
        Owners(self.world.ledger).place(
            {self.world.job: {worker: owner for owner, worker in self.workers.items()}}
        )
        self._next = iter((subtask, at) for subtask in range(SAMPLES) for at in range(2))
        self._states = iter(range(1000))
        self.last: dict[str, str] = {}

    def own(self, name: str = "own", *, repeats: bool = True) -> None:
        subtask, at = next(self._next)
        claims = Claims(repeats=repeats).model_dump_json()
        self.world.push(subtask, at, at + 1, worker=name, claims=claims)
        self.shard.turn()

    def push(self, owner: str, before: str | None = None, **changes: object) -> Header:
        """Push an update that continues from the owner's last state, or from another one."""
        subtask, at = next(self._next)
        before = self.last.get(owner, FRESH) if before is None else before
        after = digest(next(self._states)) if before else ""
        header, _ = self.world.push(
            *(subtask, at, at + 1),
            worker=self.workers[owner],
            claims=Claims(planned=at + 1, before=before, after=after).model_dump_json(),
            base=self.world.snapshots.read().meta.version,
            vector=0.01 * self.world.delta(subtask, at, at + 1),
            **changes,
        )
        self.shard.turn()
        if self.world.fate(header) == "applied":
            self.last[owner] = after
        elif at == 0:
            next(self._next)  # The rest of the subtask would be refused, too.
        return header

    def asked(self, owner: str) -> RepetitionRequest:
        """Push until an update of an owner is to be repeated."""
        for _ in range(20):
            header = self.push(owner)
            request = self.exchange.requested()
            if request is not None and request.update == header.update:
                return request
        raise AssertionError("no update was selected")

    def assigned(self, request: RepetitionRequest) -> RepetitionTask:
        """Upload states; return what another worker is asked for."""
        self.exchange.upload(request, torch.ones(10).byte(), torch.ones(12).byte())
        return self.next_task()

    def next_task(self) -> RepetitionTask:
        self.turn(2)
        task = self.exchange.task()
        assert task is not None
        return task

    def answer(self, request: RepetitionRequest, outcome: RepetitionResult) -> None:
        """Upload states, and repeat the interval, as two honest workers do."""
        task = self.assigned(request)
        assert task.update.update == request.update
        self.exchange.report(task, outcome)
        self.turn()

    def repeat(self, owner: str, outcome: RepetitionResult) -> None:
        self.answer(self.asked(owner), outcome)

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.shard.turn()

    def events(self, kind: str) -> list[str]:
        self.shard.turn()
        return [each["text"] for each in self.world.events(kind)]

    def accused(self) -> list[str]:
        self.shard.turn()
        return [each["details"]["owner"] for each in self.world.events("owner-quarantined")]


RIGHT = RepetitionResult(outcome="repeated", update=0.001, state=0.0001)
PUSHED = RepetitionResult(outcome="repeated", update=0.3, state=0.0)
POISONED = RepetitionResult(outcome="repeated", update=0.0, state=0.05)
MALFORMED = RepetitionResult(outcome="malformed", why="the state before the interval: 9 bytes")
UNABLE = RepetitionResult(outcome="unable", why="no memory")


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ONE_IN", 1)
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(reports, "TUNED_SECONDS", 0.0)
    monkeypatch.setattr(shard_module, "VIEW_SECONDS", 0.0)


@pytest.fixture
def repeated(make_world: MakeWorld) -> RepeatedWorld:
    world = RepeatedWorld(make_world)
    world.own()
    return world


# -- states that fit together ------------------------------------------------------------------


def test_each_update_continues_from_the_state_after_the_last_one(repeated: RepeatedWorld) -> None:
    states = (FRESH, None, digest(901), "", None, FRESH, None)
    fates = [repeated.world.fate(repeated.push("eve", before)) for before in states]

    wrong = "rejected:state"
    assert fates == ["applied", "applied", wrong, wrong, "applied", "applied", "applied"]


def test_without_a_machine_that_repeats_no_states_are_needed_and_an_event_says_so(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "UNREPEATED", 3)
    job = RepeatedWorld(make_world)
    job.own(repeats=False)

    fates = [job.world.fate(job.push("eve", "")) for _ in range(4)]

    assert fates == ["applied"] * 4
    (text,) = job.events("repetitions-off")
    assert "no machine of your own" in text
    assert job.exchange.requested() is None


def test_a_job_whose_updates_cant_be_repeated_says_so(make_world: MakeWorld) -> None:
    job = RepeatedWorld(lambda **fields: make_world(update={"rule": "vc-asgd"}, **fields))
    job.own()
    for _ in range(3):
        assert job.world.fate(job.push("eve", "")) == "applied"

    (text,) = job.events("repetitions-off")
    assert "vc-asgd" in text


# -- repetitions -------------------------------------------------------------------------------


def test_the_worker_is_asked_before_it_sees_that_its_update_was_applied(
    repeated: RepeatedWorld,
) -> None:
    # Given a worker whose first update was applied, so that models are kept from now on
    repeated.push("eve")

    # When the second one is taken
    seen = []
    publish = repeated.shard._publisher.publish

    def stop(*arguments: object, **options: object) -> None:
        seen.append(repeated.exchange.requested())
        publish(*arguments, **options)

    repeated.shard._publisher.publish = stop
    header = repeated.push("eve")

    # Then it was asked before that is published
    assert [each.update for each in seen if each is not None] == [header.update]


def test_the_base_and_the_update_are_those_of_the_interval(repeated: RepeatedWorld) -> None:
    repeated.push("eve")
    base = repeated.world.vector()

    task = repeated.assigned(repeated.asked("eve"))

    assert task.by == "own"
    floats = len(base)
    header = task.update
    sent = repeated.exchange.vector(task, "sent", floats)
    assert torch.equal(repeated.exchange.vector(task, "base", floats), base)
    delta = 0.01 * repeated.world.delta(header.subtask, header.start, header.stop)
    assert torch.allclose(sent, delta)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [(PUSHED, "differs by 30%"), (POISONED, "the state after it differs"), (MALFORMED, "9 bytes")],
)
def test_an_owner_of_two_wrong_updates_is_accused_since_the_last_right_one(
    repeated: RepeatedWorld, wrong: RepetitionResult, text: str
) -> None:
    repeated.repeat("eve", RIGHT)
    clean = repeated.world.snapshots.read().meta.version
    repeated.repeat("eve", wrong)
    assert repeated.accused() == []

    repeated.repeat("eve", wrong)

    assert repeated.accused() == ["eve"]
    assert len(repeated.events("repetition-failed")) == 2
    assert all(text in each for each in repeated.events("repetition-failed"))
    suspect = repeated.world.jobs.get(repeated.world.job).tuned.suspects["eve"]
    assert suspect.version is not None
    assert suspect.version < clean
    assert repeated.world.fate(repeated.push("eve")) == "rejected:suspect"
    assert repeated.world.fate(repeated.push("bob")) == "applied"


def test_nobody_is_accused_while_no_update_at_all_is_right(repeated: RepeatedWorld) -> None:
    for _ in range(3):
        for owner in ("bob", "eve"):
            repeated.repeat(owner, PUSHED)

    assert repeated.accused() == []
    (text,) = repeated.events("repetitions-unclear")
    assert "may depend on its machine" in text


def test_a_worker_that_goes_on_without_an_answer_is_wrong(repeated: RepeatedWorld) -> None:
    repeated.push("eve")
    request = repeated.asked("eve")

    for _ in range(MAX_LATER):
        assert repeated.events("repetition-failed") == []
        repeated.push("eve")

    (text,) = repeated.events("repetition-failed")
    assert "doesn't upload" in text
    assert repeated.exchange.requested() != request


def test_a_worker_that_is_lost_is_not_wrong_but_an_owner_whose_workers_always_are_is(
    repeated: RepeatedWorld,
) -> None:
    for number in range(4):
        assert repeated.accused() == []
        if number:
            worker = f"{repeated.world.job}.join-eve-{number + 1}"
            Owners(repeated.world.ledger).place({repeated.world.job: {worker: "eve"}})
            repeated.workers["eve"] = worker
            del repeated.last["eve"]
        repeated.asked("eve")
        repeated.shard.lose([repeated.workers["eve"]])
        repeated.turn()
        assert repeated.exchange.requested() is None

    assert repeated.accused() == ["eve"]
    assert repeated.events("repetition-failed") == []


@pytest.mark.parametrize(
    "answer", [b"x", b'{"before": -1, "after": 5}', b"[]", b"\xff" * (2 * MAX_ANSWER_LENGTH)]
)
def test_sizes_that_cant_be_read_are_wrong(repeated: RepeatedWorld, answer: bytes) -> None:
    repeated.push("eve")
    request = repeated.asked("eve")
    key = repeated.world.keys.payload_chunk(f"{request.worker}.states.{request.id}", 0)
    repeated.world.tensors.set(key, answer)
    repeated.turn()

    (text,) = repeated.events("repetition-failed")
    assert "can't be read" in text


def test_another_worker_is_asked_if_one_is_lost_or_cant(repeated: RepeatedWorld) -> None:
    repeated.own("own-2")
    repeated.push("eve")
    first = repeated.assigned(repeated.asked("eve"))
    repeated.shard.lose([first.by])

    second = repeated.next_task()

    assert {first.by, second.by} == {"own", "own-2"}
    repeated.exchange.report(second, RIGHT)
    repeated.turn()
    assert repeated.exchange.task() is None
    keys = repeated.world.tensor_keys()
    assert [key for key in keys if key.startswith("r:") or ".states." in key] == []


def test_a_repetition_that_nobody_can_make_ends_without_a_result(repeated: RepeatedWorld) -> None:
    repeated.push("eve")
    task = repeated.assigned(repeated.asked("eve"))
    for attempt in range(MAX_ATTEMPTS):
        task = repeated.next_task() if attempt else task
        repeated.exchange.report(task, UNABLE)
    repeated.turn(2)

    assert repeated.exchange.task() is None
    assert repeated.events("repetition-failed") == []


def test_states_start_again_when_the_model_goes_back(repeated: RepeatedWorld) -> None:
    # Given a volunteer whose states are known
    world = repeated.world
    stored = world.checkpoint()
    repeated.push("eve")
    repeated.push("eve")
    assert world.fate(repeated.push("eve", digest(700))) == "rejected:state"

    # When the model goes back
    assert world.jobs.roll_back(world.job, 1, stored.name, "", restorations=1, undone=["x"])
    repeated.turn(2)

    # Then only a new optimizer's state is known
    assert world.fate(repeated.push("eve", rollbacks=1)) == "rejected:state"
    assert world.fate(repeated.push("eve", FRESH, rollbacks=1)) == "applied"
    assert world.fate(repeated.push("eve", rollbacks=1)) == "applied"

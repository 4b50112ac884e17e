"""Loops as scripts write them: their own count of steps, a loader for each epoch, connections."""

from __future__ import annotations

import runpy
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.compat import (
    EVALUATION,
    FewPoints,
    Points,
    loop_script,
    on_workers,
    own_steps,
    simulated,
)
from support.harness import Harness
from torch import Tensor

from vcasgd.errors import UserCodeError, VcasgdError
from vcasgd.store.ledger.job import JobState
from vcasgd.task.task import Task

pytestmark = pytest.mark.usefixtures("one_thread")
EPOCHS = 2

#: A loop that counts the steps of the training itself.
OWN_COUNT = """
loader = session.loader(DataLoader(data, 64, shuffle=True))
batches = iter(loader)
for _ in range({steps}):
    try:
        batch = next(batches)
    except StopIteration:
        batches = iter(loader)
        batch = next(batches)
    optimizer.zero_grad()
    task.loss(model, batch).backward()
    optimizer.step()
# Or else torch is watched after the test, too.
del batches
sys.exit(0)
"""
#: An optimizer whose base class has hooks of its own, because there is another one of it.
DERIVED = """
class Scaled(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


torch.optim.SGD([torch.zeros(1)], lr=1)
"""
EACH_EPOCH = """
for epoch in range(2):
    for batch in session.loader(DataLoader({data}, 64, shuffle=True)):
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
"""
CONNECTED = """
class Rows(Dataset):
    def __init__(self):
        self.rows = sqlite3.connect(":memory:", 5.0, 0, None, True)
        self.rows.execute("create table samples (x blob, y int)")
        for x, y in data:
            self.rows.execute("insert into samples values (?, ?)", (x.numpy().tobytes(), int(y)))

    def __len__(self):
        return self.rows.execute("select count(*) from samples").fetchone()[0]

    def __getitem__(self, index):
        row = "select x, y from samples where rowid = ?"
        x, y = self.rows.execute(row, (int(index) + 1,)).fetchone()
        return torch.frombuffer(bytearray(x), dtype=torch.float32), y


"""


@pytest.mark.parametrize("workers", [1, 4])
def test_the_last_step_of_a_loop_that_counts_its_steps_counts(workers: int, tmp_path: Path) -> None:
    steps = EPOCHS * Points.samples // Points.batch_size
    task = loop_script(tmp_path, OWN_COUNT.format(steps=steps), before="import sys")

    ends = simulated(task, workers, epochs=EPOCHS)

    assert ends["loss"] < 1.4


@pytest.mark.ci
def test_what_a_loop_trained_before_it_ended_is_evaluated(harness: Harness, tmp_path: Path) -> None:
    # Given an epoch that is much longer than the training of the loop
    long = "Points.samples = 65536"
    loop_script(tmp_path, OWN_COUNT.format(steps=32), before=f"import sys\n{long}")

    _, job = on_workers(harness, tmp_path, "train.py", 2, epochs=EPOCHS)

    # Then the job ends with what it trained, and not with an epoch that the loop began again
    assert job.state is JobState.SUCCEEDED, job.reason
    assert "left the loop" in (job.reason or "")
    assert job.finished_epochs == 0


def test_a_loop_may_ask_for_its_loader_before_each_epoch(tmp_path: Path) -> None:
    task = loop_script(tmp_path, EACH_EPOCH.format(data="data"))

    assert simulated(task, 2, epochs=EPOCHS)["loss"] < 1.5


def test_a_loop_has_one_training_set(tmp_path: Path) -> None:
    task = loop_script(tmp_path, EACH_EPOCH.format(data="task.dataset('train')"))

    with pytest.raises(UserCodeError, match=r"session\.loader was called again with another data"):
        simulated(task, 1, epochs=EPOCHS)


# Four workers make steps again.
@pytest.mark.ci
@pytest.mark.parametrize("workers", [1, 4])
def test_a_step_may_call_that_of_its_base_class(tmp_path: Path, workers: int) -> None:
    scaled = "Scaled(model.parameters(), lr=0.1, momentum=0.9)"
    task = loop_script(tmp_path, own_steps(), before=DERIVED, optimizer=scaled)

    ends = simulated(task, workers, epochs=EPOCHS)

    assert ends["loss"] < 1.6


#: Sharpness-aware minimization with methods for its two halves, as its usual implementation has.
SHARPNESS = """
class Sharpness(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)

    def second_step(self):
        self.base.step()
"""


def test_the_remedy_names_the_optimizer_that_a_wrapper_steps(tmp_path: Path) -> None:
    loop = own_steps().replace("optimizer.step()", "optimizer.second_step()")

    def task_of(session: str) -> Callable[[], Task]:
        optimizer = "Sharpness(model.parameters())"
        return loop_script(tmp_path, loop, before=SHARPNESS, optimizer=optimizer, session=session)

    with pytest.raises(UserCodeError) as caught:
        simulated(task_of("optimizer"), 1, epochs=1)

    assert caught.value.remedy is not None
    assert "give it the one that a wrapper steps" in caught.value.remedy
    assert simulated(task_of("optimizer.base"), 1, epochs=EPOCHS)["loss"] < 1.8


TWO_LOSSES = """
for batch in session.loader(data, 64):
    optimizer.zero_grad()
    losses = task.loss(model, batch), 9 * sum(each.square().sum() for each in model.parameters())
    {backward}
    optimizer.step()
"""


@pytest.mark.parametrize("workers", [1, 4])
def test_a_step_may_have_several_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr(FewPoints, "samples", 256)
    losses = (
        TWO_LOSSES.format(backward=each)
        for each in ("torch.autograd.backward(losses)", "for loss in losses: loss.backward()")
    )

    end, expected = (
        simulated(loop_script(tmp_path, each, FewPoints), workers, epochs=1)["loss"]
        for each in losses
    )

    assert end == pytest.approx(expected, rel=1e-3)


#: A script that reads a file beside it, replaces it, and resumes from one that it has written.
FILES = """
rates = {line.split()[0]: float(line.split()[1]) for line in open("settings/rates.txt")}
assert not Path("resume.pt").exists()
for batch in session.loader(data, 64):
    optimizer.zero_grad()
    task.loss(model, batch).backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), "resume.pt")
    Path("settings/rates.txt").write_text("changed")
"""


@pytest.mark.ci
def test_paths_are_those_of_the_script_and_each_worker_has_its_own(
    harness: Harness, tmp_path: Path
) -> None:
    loop_script(tmp_path, FILES, FewPoints, before="from pathlib import Path")
    (tmp_path / "settings").mkdir()
    (tmp_path / "settings/rates.txt").write_text("first 0.1")

    # Given two workers in one folder
    _, job = on_workers(harness, tmp_path, "train.py", 2, epochs=1)

    assert job.state is JobState.SUCCEEDED, job.reason
    (kept,) = tmp_path.glob("cache/*/settings/rates.txt")
    assert kept.read_text() == "first 0.1", "the next job finds what was submitted"


@pytest.mark.parametrize(
    ("loop", "evaluation", "message"),
    [
        (own_steps("(each for each in data)"), EVALUATION, "is an iterator, .*pass a data set"),
        (
            own_steps(),
            'session.evaluation(task.dataset("validation"))(lambda model, batch: 0.5)',
            'a float, not a dict .*sums over the batch.*"count"',
        ),
        (
            "noise = torch.zeros(64, 32)\n"
            + own_steps(changes="noise.normal_(); task.loss(model, [batch[0] + noise, batch[1]])"),
            EVALUATION,
            "with a batch of 33 samples .*set min_local_batch",
        ),
        (
            "make = torch.optim.Adam\n"
            + own_steps("data, 64", "optimizer = make(model.parameters())"),
            EVALUATION,
            "without optimizer.step of .*instead of making another",
        ),
    ],
)
def test_a_usual_mistake_has_a_remedy(
    tmp_path: Path, loop: str, evaluation: str, message: str
) -> None:
    task = loop_script(tmp_path, loop, FewPoints, evaluation=evaluation)

    with pytest.raises(VcasgdError, match=message):
        simulated(task, 2, epochs=1)


#: A loop that sets gradients itself.
SETS_GRADIENTS = """
from torch.autograd import grad

for batch in session.loader(data, 64):
    loss = task.loss(model, batch)
    gradients = {grad}(loss, [*model.parameters()])
    for each, gradient in zip(model.parameters(), gradients):
        each.grad = gradient
    optimizer.step()
"""


@pytest.mark.parametrize("grad", ["torch.autograd.grad", "grad"])
@pytest.mark.parametrize("workers", [1, 4])
def test_a_loop_may_set_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, grad: str
) -> None:
    monkeypatch.setattr(FewPoints, "samples", 256)
    task = loop_script(tmp_path, SETS_GRADIENTS.format(grad=grad), FewPoints)

    end = simulated(task, workers, epochs=1)["loss"]

    expected = simulated(loop_script(tmp_path, own_steps("data, 64"), FewPoints), workers, epochs=1)
    assert end == pytest.approx(expected["loss"], rel=1e-5)


def test_a_loop_without_a_loss_is_told_how_to_have_one(tmp_path: Path) -> None:
    loop = SETS_GRADIENTS.format(grad="(lambda _, all: [torch.zeros_like(p) for p in all])")

    with pytest.raises(UserCodeError, match=r"a batch has no loss.*torch\.autograd\.grad"):
        simulated(loop_script(tmp_path, loop, FewPoints), 1, epochs=1)


def test_a_data_set_may_have_a_connection_of_its_script(tmp_path: Path) -> None:
    loop = CONNECTED + own_steps("DataLoader(Rows(), 64, shuffle=True)")

    ends = simulated(loop_script(tmp_path, loop, before="import sqlite3"), 1, epochs=1)

    assert ends["loss"] < 1.8


def test_a_layer_may_keep_what_it_has_computed(tmp_path: Path) -> None:
    loop = "model[0].last = [model[0](data[0][0])]\n" + own_steps("data, 64")

    assert simulated(loop_script(tmp_path, loop), 2, max_steps=4)["loss"] < 3


ASKS = """
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(1))
loader = session.loader(DataLoader(data, 64, shuffle=True))
for number, batch in enumerate(loader):
    optimizer.zero_grad()
    task.loss(model, batch).backward()
    optimizer.step()
    print(number * loader.batch_size, len(loader.dataset))
"""


def test_a_script_may_ask_its_loader_for_the_data_and_handle_signals(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    task = loop_script(tmp_path, ASKS, before="import signal, sys")

    assert simulated(task, 1, max_steps=4)["loss"] < 3
    assert signal.getsignal(signal.SIGUSR1) is before


#: A loop that resets gradients to zeros, so that momentum moves a layer that has no gradient.
ZEROS = """
for batch in session.loader(data, 64):
    optimizer.zero_grad(set_to_none=False)
    used = model if session.global_step < 2 else model[:3]
    task.loss(used, batch).backward()
    {clips}
    optimizer.step()
    task.seen.append(model[3].weight.detach().clone())
"""


@pytest.mark.parametrize("clips", ["pass", "nn.utils.clip_grad_norm_(model.parameters(), 1)"])
def test_a_loop_may_reset_gradients_to_zeros(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clips: str
) -> None:
    seen: list[Tensor] = []
    monkeypatch.setattr(Points, "seen", seen, raising=False)
    made = "torch.optim.SGD(model.append(nn.Linear(10, 10)).parameters(), lr=0.1, momentum=0.9)"
    loop = ZEROS.format(clips=clips)
    task = loop_script(tmp_path, loop, before="from torch import nn", optimizer=made)

    # Steps are made again if a loop clips
    simulated(task, 2 if clips != "pass" else 1, max_steps=8)

    # Two workers of a round move it alike
    assert not torch.equal(seen[-1], seen[-4])


ONE_LINE = """
def train(batch):
    optimizer.zero_grad()
    task.loss(model, batch).backward()
    optimizer.step()


for batch in session.loader(data, 64): train(batch)
"""


def test_a_loop_in_one_line_trains_all_epochs(tmp_path: Path) -> None:
    ends = [
        simulated(loop_script(tmp_path, each, FewPoints), 1, epochs=2)["loss"]
        for each in (ONE_LINE, own_steps("data, 64"))
    ]

    assert ends[0] == ends[1]


#: A loop whose code needs batches of one size, as its loader makes them on one machine.
FIXED = own_steps("DataLoader(data, 60, shuffle=True, drop_last=True)", "batch[0].view(60, 32)")


@pytest.mark.parametrize(("workers", "session"), [(1, ""), (2, ", min_local_batch=60"), (2, "")])
def test_code_for_batches_of_one_size_is_refused_before_the_training(
    tmp_path: Path, workers: int, session: str
) -> None:
    task = loop_script(tmp_path, FIXED, FewPoints, session=f"optimizer{session}")

    with pytest.raises(UserCodeError, match=r"with a batch of 4 samples .*Subset"):
        simulated(task, workers, epochs=1)


#: A loop that measures its training set after each epoch, as torch's update_bn reads it.
MEASURES = """
loader = session.loader(DataLoader(data, 64, shuffle=True))
for epoch in range(2):
    for batch in loader:
        task.seen.append((session.epoch, session.global_step))
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
    with torch.no_grad():
        assert sum(len(points) for points, _ in loader) == len(data)
"""


def test_a_loop_may_read_its_loader_without_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(FewPoints, "seen", seen, raising=False)
    task = loop_script(tmp_path, MEASURES, FewPoints)

    # On its own, it counts as in a job
    runpy.run_path(str(tmp_path / "train.py"))
    assert seen == [(step // 16, step) for step in range(32)]

    assert simulated(task, 2, epochs=2)["loss"] < 2.1


#: A layer that thaws between epochs, and a scheduler that the loop steps, over session.batches.
THAWS = """
for epoch in range(2):
    model[0].requires_grad_(epoch > 0)
    for batch in session.batches(data, 64):
        session.step(task.loss(model, batch))
"""
STEPS_SCHEDULER = """
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
for batch in session.batches(data, 64, epochs=2):
    session.step(task.loss(model, batch))
    scheduler.step()
"""


@pytest.mark.parametrize(
    ("loop", "message"),
    [
        (THAWS, r"session\.batches is called in a loop.*use session\.loader"),
        (STEPS_SCHEDULER, r"changed the learning rate.*pass schedule="),
    ],
)
def test_what_session_batches_would_leave_out_is_refused(
    tmp_path: Path, loop: str, message: str
) -> None:
    with pytest.raises(UserCodeError, match=message):
        simulated(loop_script(tmp_path, loop, FewPoints), 1, epochs=2)


def test_a_script_on_its_own_may_ask_for_batches_in_each_epoch(tmp_path: Path) -> None:
    loop_script(tmp_path, THAWS, FewPoints)

    assert runpy.run_path(str(tmp_path / "train.py"))["epoch"] == 1


def test_a_scheduler_that_session_batches_would_undo_is_refused_on_its_own(tmp_path: Path) -> None:
    loop_script(tmp_path, STEPS_SCHEDULER, FewPoints)

    with pytest.raises(UserCodeError, match="changed the learning rate"):
        runpy.run_path(str(tmp_path / "train.py"))


def test_a_loop_may_step_the_scheduler_that_the_session_follows(tmp_path: Path) -> None:
    scheduler = "scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)"
    loop_script(
        tmp_path,
        STEPS_SCHEDULER.replace("scheduler =", "_ ="),
        FewPoints,
        optimizer=f"task.optimizer(model.parameters())\n{scheduler}",
        session="optimizer, schedule=scheduler, schedule_steps=32",
    )

    optimizer = runpy.run_path(str(tmp_path / "train.py"))["optimizer"]

    assert optimizer.param_groups[0]["lr"] == pytest.approx(3e-3 * 0.9**31)

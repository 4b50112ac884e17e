"""Loops as scripts write them: their own count of steps, a loader for each epoch, connections."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.compat import Points, on_workers, script, simulated
from support.harness import Harness

from vcasgd.errors import UserCodeError
from vcasgd.store.ledger.job import JobState

pytestmark = pytest.mark.usefixtures("one_thread")
EPOCHS = 2

SCRIPT = """
import sqlite3
import sys

sys.path.insert(0, {support!r})
import torch, vcasgd
from torch.utils.data import DataLoader, Dataset
from support.compat import Points

points = Points()
data, model = points.dataset("train"), points.model()
{session}

def train(batch):
    optimizer.zero_grad()
    points.loss(model, batch).backward()
    optimizer.step()


"""
SUPPORT = str(Path(__file__).parents[1])

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
    train(batch)
# Or else torch is watched after the test, too.
del batches
sys.exit(0)
"""
#: An optimizer whose base class has hooks of its own, because there is another one of it.
DERIVED = """
class Scaled(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


torch.optim.SGD(model.parameters(), lr=1)
optimizer = Scaled(model.parameters(), lr=0.1, momentum=0.9)
session = vcasgd.Session(model, optimizer)
session.evaluation(points.dataset("validation"))(points.evaluate)
for batch in session.loader(data, 64):
    train(batch)
"""
EACH_EPOCH = """
for epoch in range(2):
    for batch in session.loader(DataLoader({data}, 64, shuffle=True)):
        train(batch)
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


for batch in session.loader(DataLoader(Rows(), 64, shuffle=True)):
    train(batch)
"""


#: The session of most scripts.
SESSION = """
optimizer = points.optimizer(model.parameters())
session = vcasgd.Session(model, optimizer)
session.evaluation(points.dataset("validation"))(points.evaluate)
"""


def written(loop: str, session: str = SESSION, **values: object) -> str:
    return (SCRIPT + loop).format(support=SUPPORT, session=session, **values)


@pytest.mark.parametrize("workers", [1, 4])
def test_the_last_step_of_a_loop_that_counts_its_steps_counts(workers: int, tmp_path: Path) -> None:
    steps = EPOCHS * Points.samples // Points.batch_size

    ends = simulated(script(written(OWN_COUNT, steps=steps), tmp_path), workers, epochs=EPOCHS)

    assert ends["loss"] < 1.4


@pytest.mark.ci
def test_what_a_loop_trained_before_it_ended_is_evaluated(harness: Harness, tmp_path: Path) -> None:
    # Given an epoch that is much longer than the training of the loop
    source = written(OWN_COUNT, steps=32).replace(
        "= Points()", "= Points()\npoints.samples = 65536"
    )
    (tmp_path / "train.py").write_text(source)

    _, job = on_workers(harness, tmp_path, "train.py", 2, epochs=EPOCHS)

    # Then the job ends with what it trained, and not with an epoch that the loop began again
    assert job.state is JobState.SUCCEEDED, job.reason
    assert "left the loop" in (job.reason or "")
    assert job.finished_epochs == 0


def test_a_loop_may_ask_for_its_loader_before_each_epoch(tmp_path: Path) -> None:
    task = script(written(EACH_EPOCH, data="data"), tmp_path)

    assert simulated(task, 2, epochs=EPOCHS)["loss"] < 1.5


def test_a_loop_has_one_training_set(tmp_path: Path) -> None:
    task = script(written(EACH_EPOCH, data="points.dataset('train')"), tmp_path)

    with pytest.raises(UserCodeError, match=r"session\.loader was called again with another data"):
        simulated(task, 1, epochs=EPOCHS)


# Four workers make steps again.
@pytest.mark.parametrize("workers", [1, 4])
def test_a_step_may_call_that_of_its_base_class(tmp_path: Path, workers: int) -> None:
    ends = simulated(script(written(DERIVED, session=""), tmp_path), workers, epochs=EPOCHS)

    assert ends["loss"] < 1.6


#: Sharpness-aware minimization with methods for its two halves, as its usual implementation has.
SHARPNESS = """
class Sharpness(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {{}})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)

    def second_step(self):
        self.base.step()


optimizer = Sharpness(model.parameters())
session = vcasgd.Session(model, {optimizer})
session.evaluation(points.dataset("validation"))(points.evaluate)
for batch in session.loader(data, 64):
    optimizer.zero_grad()
    points.loss(model, batch).backward()
    optimizer.second_step()
"""


def test_the_remedy_names_the_optimizer_in_a_wrapper(tmp_path: Path) -> None:
    task = script(written(SHARPNESS, session="", optimizer="optimizer"), tmp_path)

    with pytest.raises(UserCodeError) as caught:
        simulated(task, 1, epochs=1)

    assert caught.value.remedy is not None
    assert "optimizer.base, pass that to the Session" in caught.value.remedy
    task = script(written(SHARPNESS, session="", optimizer="optimizer.base"), tmp_path, "base.py")
    assert simulated(task, 1, epochs=EPOCHS)["loss"] < 1.8


TWO_LOSSES = """
for batch in session.loader(data, 64):
    optimizer.zero_grad()
    losses = points.loss(model, batch), sum(each.square().mean() for each in model.parameters())
    {backward}
    optimizer.step()
"""


@pytest.mark.parametrize("workers", [1, 4])
def test_a_step_may_have_several_losses(tmp_path: Path, workers: int) -> None:
    at_once = script(written(TWO_LOSSES, backward="torch.autograd.backward(losses)"), tmp_path)
    in_turn = written(TWO_LOSSES, backward="for loss in losses: loss.backward()")

    end = simulated(at_once, workers, epochs=EPOCHS)["loss"]

    expected = simulated(script(in_turn, tmp_path, "in_turn.py"), workers, epochs=EPOCHS)["loss"]
    assert end == pytest.approx(expected, rel=1e-3)


def test_a_data_set_may_have_a_connection_of_its_script(tmp_path: Path) -> None:
    ends = simulated(script(written(CONNECTED), tmp_path), 1, epochs=1)

    assert ends["loss"] < 1.8

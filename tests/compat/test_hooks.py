"""Loops of their own: schedulers, code between epochs, and the loop's own end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compat import (
    FewPoints,
    Metrics,
    Points,
    assert_as_plain,
    extended,
    grid,
    loop_script,
    on_workers,
    simulated,
    train_plainly,
)
from support.harness import Harness

from vcasgd.errors import SpecError, UserCodeError
from vcasgd.store.ledger.job import JobState

pytestmark = pytest.mark.usefixtures("one_thread")

EPOCHS = 2
STEPS = EPOCHS * Points.samples // Points.batch_size

LOOP = """
loader = session.loader(DataLoader(data, batch_size=64, shuffle=True))
for epoch in range({epochs}):
    for batch in loader:
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        {by_step}
    {by_epoch}
"""

SGD = "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)"
GROUPS = (
    "torch.optim.SGD([{'params': model[0].parameters()}, "
    "{'params': model[2].parameters(), 'lr': 0.02}], lr=0.1, momentum=0.9)"
)
LR = "torch.optim.lr_scheduler."
WARMUP = f"{LR}LinearLR(optimizer, 0.01, total_iters=40)"
COSINE = f"{LR}CosineAnnealingLR(optimizer, {STEPS} - 40)"
SCHEDULERS = {
    "OneCycleLR with its momentum": (SGD, f"{LR}OneCycleLR(optimizer, 0.4, total_steps={STEPS})"),
    "a function for each group": (
        GROUPS,
        f"{LR}LambdaLR(optimizer, [lambda n: 1 - n / {STEPS}, lambda n: 0.5 + n / {STEPS}])",
    ),
    "warm-up, then a cosine": (
        SGD,
        f"{LR}SequentialLR(optimizer, [{WARMUP}, {COSINE}], milestones=[40])",
    ),
}


def loop(
    folder: Path,
    optimizer: str,
    scheduler: str,
    by_step: str = "pass",
    by_epoch: str = "pass",
    task: type[Points] = FewPoints,
    before: str = "",
) -> Any:
    source = LOOP.format(by_step=by_step, by_epoch=by_epoch, epochs=EPOCHS)
    made = f"{optimizer}; scheduler = {scheduler}"
    return loop_script(folder, source, task, optimizer=made, before=before)


def plain_loop(made: str, scheduled: str, *, by_epoch: bool = False) -> Callable[..., Metrics]:
    """Return a loop that trains as the script does, in one process and without vcasgd."""

    def loop(task: Points, model: Any, _: Any, *others: int) -> Metrics:
        names: dict[str, Any] = {"torch": torch, "model": model}
        optimizer = names["optimizer"] = eval(made, names)
        scheduler = eval(scheduled, names)

        def after_step(step: int) -> None:
            if not by_epoch or step % (STEPS // EPOCHS) == 0:
                scheduler.step()

        return train_plainly(task, model, optimizer, *others, after_step=after_step)

    return loop


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Rates that a loop adds to those of its task."""
    found: list[float] = []
    monkeypatch.setattr(FewPoints, "rates", found, raising=False)
    return found


def test_a_new_worker_knows_the_scheduler_after_its_first_step(
    tmp_path: Path, rates: list[float]
) -> None:
    note = "task.rates.append(optimizer.param_groups[0]['lr'])"
    task = loop(tmp_path, SGD, f"{LR}StepLR(optimizer, 1, 0.5)", note, "scheduler.step()")

    simulated(task, 1, epochs=EPOCHS)

    steps = FewPoints.samples // FewPoints.batch_size
    assert rates[-2 * steps :] == [0.1] * steps + [0.05] * steps


@pytest.mark.parametrize("dropped", [1, 63])
def test_a_scheduler_has_the_steps_of_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rates: list[float], dropped: int
) -> None:
    # Given a loader that drops the last batch of an epoch, whose samples count in a job
    monkeypatch.setattr(FewPoints, "samples", 256 + dropped)
    note = "scheduler.step(); task.rates.append(optimizer.param_groups[0]['lr'])"
    scheduler = f"{LR}OneCycleLR(optimizer, 0.4, epochs={EPOCHS}, steps_per_epoch=4)"
    source = LOOP.format(by_step=note, by_epoch="pass", epochs=EPOCHS)
    source = source.replace("shuffle=True", "shuffle=True, drop_last=True")
    task = loop_script(
        tmp_path, source, optimizer=f"{SGD}; scheduler = {scheduler}", task=FewPoints
    )

    simulated(task, 1, epochs=EPOCHS)

    # Then they are trained with the rate that follows
    optimizer = torch.optim.SGD([torch.zeros(1)])
    plain = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.4, epochs=EPOCHS, steps_per_epoch=4)
    expected = [optimizer.param_groups[0]["lr"]]
    for _ in range(EPOCHS * 4):
        optimizer.step()
        plain.step()
        expected.append(optimizer.param_groups[0]["lr"])
    assert list(dict.fromkeys(rates)) == pytest.approx(expected[: 8 + (dropped > 1)])


def test_a_scheduler_that_ends_before_the_job_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    monkeypatch.setattr(FewPoints, "made", made, raising=False)
    steps = EPOCHS * FewPoints.samples // FewPoints.batch_size
    scheduler = f"{LR}OneCycleLR(optimizer, 0.4, total_steps={steps - 2})"
    task = loop(tmp_path, SGD, scheduler, "scheduler.step(); task.made.append(1)")

    with pytest.raises(SpecError, match=f"has {steps - 2} steps, and the job makes {steps}"):
        simulated(task, 1, epochs=EPOCHS)

    # Once for each of what is only tried, and the first step of the job
    assert len(made) < steps // 2


WARM = f"{LR}SequentialLR(optimizer, [{LR}ConstantLR(optimizer), {{}}], [8])"


@pytest.mark.parametrize(("length", "noted"), [(32, False), (200, True)])
@pytest.mark.parametrize("before", [0, 8])
def test_a_cosine_of_another_length_than_the_job_is_noted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, before: int, length: int, noted: bool
) -> None:
    cosine = f"{LR}CosineAnnealingLR(optimizer, {length - before})"
    scheduler = WARM.format(cosine) if before else cosine
    task = loop(tmp_path, SGD, scheduler, "scheduler.step()")

    simulated(task, 1, epochs=EPOCHS)

    assert ("CosineAnnealingLR has T_max" in caplog.text) == noted


def test_a_loop_that_stores_its_scheduler(tmp_path: Path) -> None:
    path = tmp_path / "scheduler.pt"
    save = f"torch.save(scheduler.state_dict(), '{path}')"
    task = loop(tmp_path, *SCHEDULERS["warm-up, then a cosine"], "scheduler.step()", save)

    simulated(task, 2, epochs=EPOCHS)

    stored = torch.load(path)
    assert {"last_epoch", "_milestones"} <= stored.keys()
    assert not {"step", "state_dict"} & stored.keys()


@pytest.mark.parametrize(
    "name",
    [
        "OneCycleLR with its momentum",
        "warm-up, then a cosine",
        *extended("a function for each group"),
    ],
)
@grid
@pytest.mark.ci
def test_a_scheduler_that_the_loop_steps(workers: int, name: str, tmp_path: Path) -> None:
    task = loop(tmp_path, *SCHEDULERS[name], by_step="scheduler.step()", task=Points)

    assert_as_plain(task, workers, EPOCHS, twin=Points, loop=plain_loop(*SCHEDULERS[name]))


@grid
@pytest.mark.ci
def test_a_scheduler_that_the_loop_steps_after_each_epoch(workers: int, tmp_path: Path) -> None:
    scheduled = SGD, f"{LR}StepLR(optimizer, 1, gamma=0.2)"
    task = loop(tmp_path, *scheduled, by_epoch="scheduler.step()", task=Points)

    loop_by_epoch = plain_loop(*scheduled, by_epoch=True)
    assert_as_plain(task, workers, EPOCHS, twin=Points, loop=loop_by_epoch)


BY_EPOCH, FOLLOWED = (SGD, f"{LR}StepLR(optimizer, 1)"), SCHEDULERS["warm-up, then a cosine"]
#: The first layer is added later.
LAST_LAYER = "torch.optim.SGD(model[2].parameters(), lr=0.1)"
ADDED = "optimizer.add_param_group({'params': model[0].parameters()})"
SOME = "after some steps or epochs only"


@pytest.mark.parametrize(
    ("made", "changes", "message"),
    [
        (FOLLOWED, {"by_step": "scheduler.step(epoch + 0.5)"},
         "with an argument, which counts steps or epochs of one"),
        (FOLLOWED, {"by_step": "if torch.rand(()) < 0.3: scheduler.step()"}, SOME),
        (BY_EPOCH, {}, f"never, or {SOME}"),
        (BY_EPOCH, {"by_epoch": "if loss < 9: scheduler.step()"}, "between epochs by loss"),
        *(((optimizer, "None"), {"by_step": "optimizer.param_groups[0]['lr'] *= 0.1"},
           "the loop changed the learning rate")
          for optimizer in (SGD, SGD.replace("0.1", "torch.tensor(0.1)"))),
        ((LAST_LAYER, BY_EPOCH[1]), {"by_epoch": f"scheduler.step(); {ADDED}"},
         "a group of parameters was added to an optimizer with"),
        ((SGD, f"{LR}ReduceLROnPlateau(optimizer)"), {}, "ReduceLROnPlateau"),
    ],
)  # fmt: skip
def test_rates_that_follow_one_worker_are_refused(
    tmp_path: Path, made: tuple[str, str], changes: dict[str, str], message: str
) -> None:
    with pytest.raises((UserCodeError, SpecError), match=message):
        simulated(loop(tmp_path, *made, **changes), 2, epochs=EPOCHS)


def test_a_scheduler_of_every_few_steps_has_a_remedy(tmp_path: Path, rates: list[float]) -> None:
    note = "task.rates.append(optimizer.param_groups[0]['lr'])"

    counted = "(counts := iter(range(99)), {})[1]".format(f"{LR}StepLR(optimizer, 2, 0.5)")
    few = loop(tmp_path, SGD, counted, "next(counts) % 4 == 3 and scheduler.step()")
    with pytest.raises(UserCodeError) as caught:
        simulated(few, 1, epochs=EPOCHS)

    # Then one with lengths that are four times as large has the rates
    assert "lengths" in (caught.value.remedy or "")
    scheduler = f"{LR}StepLR(optimizer, 8, 0.5)"
    simulated(loop(tmp_path, SGD, scheduler, f"{note}; scheduler.step()"), 1, epochs=EPOCHS)
    assert rates[-17::8] == [0.05, 0.025, 0.0125]


def test_a_loop_may_add_a_group_with_a_rate_of_its_own(tmp_path: Path) -> None:
    optimizer = "torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)"
    added = "{'params': model[0].parameters(), 'lr': 0.05}"
    task = loop(
        tmp_path, optimizer, "None", by_epoch=f"if epoch == 0: optimizer.add_param_group({added})"
    )

    ends = simulated(task, 2, epochs=EPOCHS)

    assert ends["loss"] < simulated(task, 2, epochs=1)["loss"]


#: An optimizer around another one, as libraries have it: both have the same groups.
WRAPPED = """
class Wrapper(torch.optim.Optimizer):
    def __init__(self, optimizer):
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups
        self.state = {}

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure=None):
        self.optimizer.step()
"""


@pytest.mark.parametrize("scheduled", ["optimizer", "optimizer.optimizer"])
def test_a_scheduler_follows_the_groups_that_two_optimizers_have(
    tmp_path: Path, rates: list[float], scheduled: str
) -> None:
    note = "task.rates.append(optimizer.optimizer.param_groups[0]['lr'])"
    made = f"Wrapper({SGD})", f"{LR}StepLR({scheduled}, 1, 0.5)"
    task = loop(tmp_path, *made, note, "scheduler.step()", before=WRAPPED)

    simulated(task, 2, epochs=EPOCHS)

    # Batches that are only compared have the rate 0
    assert {*rates} - {0.0} == {0.1, 0.05}


def test_a_loop_may_set_rates_of_a_group_that_it_has_kept(
    tmp_path: Path, rates: list[float]
) -> None:
    kept = "(group := optimizer.param_groups[0]) and None"
    by_step = "group['lr'] = 1e-3; task.rates.append(optimizer.param_groups[0]['lr'])"
    task = loop(tmp_path, SGD, kept, f"session.global_step; {by_step}")

    simulated(task, 1, max_steps=4)

    assert set(rates) == {1e-3}


def test_a_loop_may_set_rates_by_the_epoch_of_the_job(tmp_path: Path, rates: list[float]) -> None:
    by_step = "optimizer.param_groups[0]['lr'] = 0.1 * 0.5 ** session.epoch"
    by_step += "; task.rates.append(optimizer.param_groups[0]['lr'])"
    task = loop(tmp_path, SGD, "None", by_step)

    simulated(task, 2, epochs=EPOCHS)

    assert set(rates) == {0.1, 0.05}


# With eight, a worker has work of one of the epochs only, and so none between them.
@pytest.mark.parametrize("workers", [4, *extended(1)])
def test_code_after_each_epoch_runs_once_for_each(workers: int, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    note = f"import tempfile; tempfile.mkstemp(f'_{{epoch}}', dir={str(tmp_path / 'notes')!r})"
    task = loop(tmp_path, SGD, "None", by_epoch=note)

    simulated(task, workers, epochs=EPOCHS)

    # Not after the last one, because the job ends there
    epochs = [int(each.name.rpartition("_")[2]) for each in (tmp_path / "notes").iterdir()]
    assert sorted(epochs) == sorted([*range(EPOCHS - 1)] * workers)


#: A loop that stops when its own validation gets worse.
OWN_STOP = """
loader = session.loader(DataLoader(data, batch_size=64, shuffle=True))
best, worse = float("inf"), 0
for epoch in range(30):
    for batch in loader:
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
    loss = evaluate_plainly(task, model)["loss"]
    model.train()
    best, worse = min(best, loss), worse + 1 if loss > best else 0
    if worse == 2:
        break
"""


@pytest.mark.ci
def test_a_loop_that_stops_by_its_own_validation_ends_the_job(
    harness: Harness, tmp_path: Path
) -> None:
    head = "from support.compat import evaluate_plainly"
    loop_script(tmp_path, OWN_STOP, before=head, optimizer=SGD.replace("0.1", "0.3"))

    _, job = on_workers(harness, tmp_path, "train.py", 2, epochs=30)

    assert job.state is JobState.SUCCEEDED, job.reason
    assert "train.py left the loop over its batches in epoch" in (job.reason or "")
    assert job.finished_epochs < 30
    assert job.best is not None
    assert job.final_evaluation == job.best.number

"""Loops that set learning rates between epochs themselves, or step other schedulers then."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from support.compat import FewPoints, long, loop_script, simulated

from vcasgd.errors import UserCodeError
from vcasgd.task.place import Place

pytestmark = pytest.mark.usefixtures("one_thread")

EPOCHS = 6
STEPS = FewPoints.samples // FewPoints.batch_size

LOOP = """
{before}
loader = session.loader(DataLoader(data, 64, shuffle=True))
for epoch in range(6):
    {start}
    for batch in loader:
        task.rates.append(optimizer.param_groups[0]["lr"])
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
    {end}
"""
SGD = "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)"
#: As in PyTorch's example that trains on ImageNet.
ADJUST = """
def adjust_learning_rate(optimizer, epoch, args):
    lr = args.lr * (0.1 ** (epoch // 2))
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr


args = argparse.Namespace(lr=0.1)
"""
#: PyTorch's documented recipe, as torch.optim.swa_utils has it.
SWA = """
swa_model = AveragedModel(model)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
swa_scheduler = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
swa_start = 2
"""
AVERAGES = """if epoch > swa_start:
        swa_model.update_parameters(model)
        swa_scheduler.step()
    else:
        scheduler.step()"""
#: A class that counts by its own attributes.
OWN = """
class Decay:
    def __init__(self, optimizer):
        self.optimizer, self.calls = optimizer, 0

    def lower(self):
        self.calls += 1
        self.optimizer.param_groups[0]["lr"] = 0.1 / self.calls


decay = Decay(optimizer)
"""
#: An evaluation, which isn't made again for a rate.
JUDGED = """
def judged(model):
    model.eval()
    return 1.0


"""
EACH = "for g in optimizer.param_groups:"


def loop(
    folder: Path, before: str = "", start: str = "pass", end: str = "pass", head: str = ""
) -> Any:
    imports = f"import argparse\nfrom torch.optim.swa_utils import AveragedModel, SWALR\n{head}"
    source = LOOP.format(before=before, start=start, end=end)
    return loop_script(folder, source, FewPoints, optimizer=SGD, before=imports)


def rates_of(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    rates: list[float] = []
    monkeypatch.setattr(FewPoints, "rates", rates, raising=False)
    return rates


#: Code before the loop, at the start of an epoch, and at its end.
SETS = {
    "ImageNet": (ADJUST, "adjust_learning_rate(optimizer, epoch, args)", "pass"),
    "SWA": (SWA, "pass", AVERAGES),
    "milestones": ("", "pass", f"if epoch in (1, 3):\n        {EACH} g['lr'] *= 0.1"),
    "factor": ("", "pass", f"{EACH} g['lr'] *= 0.9"),
    "variable": ("lr = 0.1", f"if epoch > 2: lr = lr / 2\n    {EACH} g['lr'] = lr", "pass"),
    "function of a number": (
        "base = 0.1",
        f"lr = base * 0.5**epoch\n    {EACH} g['lr'] = lr",
        "print(epoch)",
    ),
}


@pytest.mark.parametrize("name", [*list(SETS)[:2], *long(*list(SETS)[2:])])
def test_rates_that_a_loop_sets_between_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    rates = rates_of(monkeypatch)
    make_task = loop(tmp_path, *SETS[name])
    runpy.run_path(str(tmp_path / "train.py"))
    expected = rates[::STEPS]
    assert len(expected) == EPOCHS
    assert len(set(rates)) > 2

    # Whichever epoch a new worker begins with
    task = make_task()
    task.model()
    for epoch in (3, 0, 5, 1):
        place = Place(epoch / EPOCHS, epoch * STEPS, EPOCHS * STEPS, epoch, 0, STEPS)
        (options,) = task.step_options(place) or ()
        assert options["lr"] == pytest.approx(expected[epoch])

    rates.clear()
    simulated(make_task, 2, epochs=EPOCHS)

    # Batches that are only compared have the rate 0
    assert sorted({*rates} - {0.0}) == pytest.approx(sorted({*expected}))
    assert rates[-1] == pytest.approx(expected[-1])


@pytest.mark.parametrize(
    ("before", "start", "end", "name"),
    [
        ("", "pass", f"if loss < 1.5:\n        {EACH} g['lr'] = 0.01", "loss"),
        (JUDGED, "pass", f"if judged(model) < 1.5:\n        {EACH} g['lr'] = 0.01", "judged"),
        (OWN, "decay.lower()", "pass", r"self\.calls"),
    ],
    ids=["loss", "evaluation", "calls"],
)
def test_rates_that_depend_on_more_than_the_epoch_are_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, start: str, end: str, name: str
) -> None:
    rates = rates_of(monkeypatch)

    with pytest.raises(UserCodeError, match=f"between epochs by .*{name}.*session.epoch"):
        simulated(loop(tmp_path, before, start, end), 2, epochs=2)

    assert not rates


def test_a_branch_that_is_never_taken_is_no_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = rates_of(monkeypatch)
    before = "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)"
    plateau = "torch.optim.lr_scheduler.ReduceLROnPlateau"
    end = f"""if isinstance(scheduler, {plateau}):
        scheduler.step(loss)
    else:
        scheduler.step()"""

    simulated(loop(tmp_path, before, end=end), 1, epochs=2)

    assert {*rates} - {0.0} == {0.1, 0.05}

"""Code of a script that a job doesn't run, because it ends in the script's loop, is noted."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.compat import facts_of, loop_script, script

pytestmark = pytest.mark.usefixtures("one_thread")

#: A script in the usual form: functions, an epoch after the other, and what is done at the end.
MAIN = """
def train(loader):
    for batch in loader:
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()


def fit():
    loader = session.loader(data, 64)
    for epoch in range(2):
        train(loader)
        torch.save(model.state_dict(), "epoch.pt")
    {inner}


if __name__ == "__main__":
    started = time.perf_counter()
    fit()
    print(f"{{time.perf_counter() - started:.1f}} s")
    {outer}
"""
#: Loops that have no other loop around them, and one that its own training has not.
BATCHES = """
for seed in [1]:
    for batch in session.batches(data, 64, epochs=2):
        session.step(task.loss(model, batch))
    {inner}
{outer}
"""
FOLDS = """
import torch, vcasgd
from torch.utils.data import DataLoader
from support.compat import FewPoints

task = FewPoints()
for fold in range(5):
    model, data = task.model(), task.dataset("train")
    optimizer = task.optimizer(model.parameters())
    session = vcasgd.Session(model, optimizer)
    session.evaluation(task.dataset("validation"))(task.evaluate)
    for epoch in range(2):
        for batch in session.loader(data, 64):
            optimizer.zero_grad()
            task.loss(model, batch).backward()
            optimizer.step()
"""
SAVES = 'torch.save(model.state_dict(), "model.pt")'


@pytest.mark.parametrize(
    ("loop", "inner", "outer", "first"),
    [
        (MAIN, "pass", "pass", None),
        (MAIN, "writer = open('log'); writer.close()", "pass", "open(…)"),
        (MAIN, "pass", "if epochs := 2: print('done'); sys.exit()", None),
        (MAIN, "pass", "torch.distributed.destroy_process_group()", None),
        (MAIN, "pass", "def later(): torch.save(model, 'model.pt')", None),
        (MAIN, "pass", SAVES, "torch.save(…)"),
        (MAIN, "model.eval()", SAVES, "torch.save(…)"),
        (MAIN, "pass", "with torch.no_grad(): print(f'{evaluate(model):.3f}')", "evaluate(…)"),
        (MAIN, "pass", "if accelerator.is_main_process() and get_rank() == 0: print(best)", None),
        (BATCHES, "pass", "print(len(data))", None),
        (BATCHES, "pass", SAVES, "torch.save(…)"),
        (BATCHES, SAVES, "pass", "torch.save(…)"),
    ],
)
@pytest.mark.parametrize("workers", [1, 4])
def test_code_that_a_job_does_not_run_is_noted(
    tmp_path: Path, loop: str, inner: str, outer: str, first: str | None, workers: int
) -> None:
    task = loop_script(tmp_path, loop.format(inner=inner, outer=outer), before="import sys, time")()

    note = facts_of(task, workers).notes.get("code-not-run", "")

    assert bool(note) == (first is not None)
    if first is not None:
        lines = (tmp_path / "train.py").read_text().splitlines()
        at = max(n for n, line in enumerate(lines, 1) if first.removesuffix("…)") in line)
        assert note.startswith(f"train.py, line {at}: {first} and what follows don't run")
        assert "vcasgd download" in note


def test_folds_after_the_first_are_noted(tmp_path: Path) -> None:
    task = script(FOLDS, tmp_path)()

    assert facts_of(task).notes["code-not-run"].startswith("train.py, line 6: further turns of")

"""Parameters that the vector can't hold as they are: what is rounded is said."""

from __future__ import annotations

from pathlib import Path

from support.compat import on_workers, script
from support.harness import Harness

from vcasgd.store.ledger.job import JobState

#: A model in double precision.
DOUBLE = """
import torch
import vcasgd

model = torch.nn.Linear(1, 1).double()
session = vcasgd.Session(model, torch.optim.SGD(model.parameters(), lr=0.1))
data = [torch.ones(1, dtype=torch.float64)] * 64

@session.evaluation(data)
def evaluate(model, batch):
    return {"loss": model(batch).square().sum(), "count": torch.tensor(len(batch))}

for batch in session.batches(data, batch_size=8):
    session.step(model(batch).square().mean())
"""


def test_a_model_in_double_precision_is_noted(harness: Harness, tmp_path: Path) -> None:
    script(DOUBLE, tmp_path)
    _, job = on_workers(harness, tmp_path, "train.py", 1, epochs=1)

    assert job.state is JobState.SUCCEEDED, job.failure
    assert any(note.startswith("weight is float64") for note in job.notes), job.notes
    assert len(harness.events(job.id, "float64-rounded")) == 1

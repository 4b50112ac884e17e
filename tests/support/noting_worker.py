"""A worker that notes the local steps of each of its push intervals."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vcasgd.worker.interval import Trained
from vcasgd.worker.learner import Learner
from vcasgd.worker.main import main

#: Variable with the folder of the notes, each of which has the name of its process.
NOTES = "NOTED_INTERVALS"


def run() -> int:
    honest = Learner.train

    def train(self: Learner, *arguments: Any, **options: Any) -> Trained:
        trained = honest(self, *arguments, **options)
        with (Path(os.environ[NOTES]) / str(os.getpid())).open("a") as notes:
            notes.write(f"{trained.steps}\n")
        return trained

    Learner.train = train
    return main()


def intervals(notes: Path, pid: int) -> list[int]:
    """Return the local steps of a process's push intervals until now."""
    note = notes / str(pid)
    return [int(each) for each in note.read_text().split()] if note.exists() else []

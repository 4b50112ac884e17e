"""A job of a running stack that counts how often each of its samples is applied."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from vcasgd.chaos.audited_job import FINISH_SECONDS, CountReport, counting_spec
from vcasgd.client import Client

#: Enough for a few faults.
EPOCHS = 2


def training_machines(client: Client) -> int:
    """Return the number of machines that joined and have a worker."""
    return len([row for row in client.machines() if row.joined and row.job])


class CountedJob:
    """A job that counts its samples, and trains until :meth:`finish`."""

    def __init__(self, client: Client, folder: Path, epochs: int = EPOCHS) -> None:
        self._epochs = epochs
        self._client = client
        self._folder = folder
        self._hold = folder / "hold"
        self._hold.touch()
        self.id = client.submit_directory(counting_spec(epochs, self._hold)).id

    def updates(self) -> int:
        return self._client.job(self.id).totals.updates

    def await_updates(self, count: int, eventually: Callable[..., Any]) -> None:
        """Wait until the model has more than so many new updates."""
        reached = self.updates()
        eventually(lambda: self.updates() > reached + count)

    def finish(self) -> None:
        """Wait for the end; fail unless every sample was applied exactly once."""
        self._hold.unlink()
        job = self._client.job(self.id).wait(FINISH_SECONDS)
        assert job.state == "succeeded", job.reason
        report = CountReport()
        model = self._client.job(self.id).download(self._folder / "model.safetensors")
        report.count(load_file(model)["count"], self._epochs)
        assert report.passed, "\n".join(report.describe_counts())
        assert report.samples_applied == report.samples_expected > 0

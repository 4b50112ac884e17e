"""A job of a running stack that counts how often each of its samples is applied."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from support.waiting import await_truth
from vcasgd.chaos.audited_job import FINISH_SECONDS, CountReport, counting_spec
from vcasgd.client import Client
from vcasgd.schemas.jobs import JobView
from vcasgd.settings import Settings
from vcasgd.spec.job import JobSpec
from vcasgd.stack import StackHome, StackState, running

#: Enough for a few faults.
EPOCHS = 2
#: Seconds of a local step of a job that a test watches, until it is finished.
HELD_SECONDS = 0.5


@contextmanager
def client_of(settings: Settings) -> Iterator[Client]:
    with running(settings):
        home = StackHome(settings.home_path)
        with Client(StackState.read(home.path).api_url, home.token() or "") as client:
            yield client


def training_machines(client: Client) -> int:
    """Return the number of machines that joined and have a worker."""
    return len([row for row in client.machines() if row.joined and row.job])


class CountedJob:
    """A job that counts its samples, and trains until :meth:`finish`."""

    def __init__(
        self,
        client: Client,
        folder: Path,
        epochs: int = EPOCHS,
        *,
        step_seconds: float | None = None,
        padding: int = 0,
        **fields: Any,
    ) -> None:
        """Submit it. ``step_seconds`` are those of a local step, ``padding`` is the number of
        parameters besides the counted ones, and ``fields`` are those of its spec."""
        self._epochs = epochs
        self._client = client
        self._folder = folder
        self._hold = folder / f"hold-{secrets.token_hex(4)}"
        self._hold.touch()
        self.spec = held_spec(epochs, self._hold, step_seconds, padding, **fields)
        self.id = client.submit_directory(self.spec).id

    def updates(self) -> int:
        return self._client.job(self.id).totals.updates

    def await_updates(self, count: int) -> None:
        """Wait until the model has more than so many new updates."""
        reached = self.updates()
        await_truth(lambda: self.updates() > reached + count)

    def machines(self) -> set[str]:
        return {row.id for row in self._client.machines() if row.job == self.id}

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event.details for event in self._client.job(self.id).events() if event.kind == kind]

    def release(self) -> None:
        self._hold.unlink(missing_ok=True)

    def finish(self) -> JobView:
        """Wait for the end; fail unless every sample was applied exactly once in each epoch."""
        self.release()
        view = self._client.job(self.id).wait(FINISH_SECONDS)
        assert view.state == "succeeded", view.reason
        report = CountReport()
        model = self._client.job(self.id).download(self._folder / f"{self.id}.safetensors", "last")
        report.count(load_file(model)["count"], self._epochs)
        assert report.passed, "\n".join(report.describe_counts())
        assert report.samples_applied == report.samples_expected > 0
        return view


def held_spec(
    epochs: int, hold: Path, step_seconds: float | None, padding: int = 0, **fields: Any
) -> JobSpec:
    """Return the spec of a job that doesn't end while a file exists."""
    spec = counting_spec(epochs, hold).model_dump(mode="json")
    spec["args"]["padding"] = padding
    if step_seconds is not None:
        spec["args"]["step_seconds"] = step_seconds
    spec["args"] |= fields.pop("args", {})
    return JobSpec.parse({**spec, **fields})

"""Training on the full MNIST with one eviction. Needs the data; see examples/mnist/README.md."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vcasgd.client import Client
from vcasgd.settings import Settings
from vcasgd.spec.job import JobSpec
from vcasgd.stack import StackHome, running

EXAMPLE = Path(__file__).parents[2] / "examples" / "mnist"
DATA = EXAMPLE / "data" / "mnist.npz"

pytestmark = [
    pytest.mark.extended,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not DATA.exists(), reason=f"the data set is not there: {DATA}"),
]


def test_mnist_trains_in_five_epochs_despite_an_eviction(
    tmp_path: Path, eventually: Callable[..., Any]
) -> None:
    spec = JobSpec.load(EXAMPLE / "job.yaml")
    assert spec.epochs <= 5
    settings = Settings(home=tmp_path / "home", api_port=0, local_capacity=3)
    with running(settings) as state:
        token = StackHome(settings.home_path).token()
        with Client(state.api_url, token or "") as client:
            # Given a job on three machines
            job = client.submit_directory(spec).id

            # When one of them is evicted during training
            eventually(lambda: client.job(job).totals.updates > 5)
            trained = [row for row in client.job(job).workers() if row.steps]
            client.evict(machine=trained[0].machine, notice_seconds=2)

            # Then the model is accurate, and no work was lost
            view = client.job(job).wait(600)
            assert view.state == "succeeded", view.reason
            assert view.evictions == 1, "the fault fired"
            assert view.evaluations[-1].metrics["accuracy"] >= 0.985
            assert view.progress.samples_lost == view.progress.samples_repeated == 0

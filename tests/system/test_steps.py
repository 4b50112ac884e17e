"""Workers that fetch steps instead of whole snapshots, on real processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.harness import Harness
from support.training import Training

Eventually = Callable[..., Any]

SAMPLES, EPOCHS = 3000, 2


@pytest.mark.extended
def test_deaths_of_the_parameter_server_lose_nothing_of_the_model(
    harness: Harness, eventually: Eventually
) -> None:
    # Given a model with one element for each sample, and steps of a twentieth of its bytes
    training = Training(
        harness,
        samples=SAMPLES,
        epochs=EPOCHS,
        subtasks=10,
        push_every=2,
        update={"rule": "async-local-sgd", "eta": 1.0, "codec": "int2"},
        workers={"max": 2},
    )
    workers = training.start(2)

    # When its parameter server is killed while workers push
    for deaths in range(1, 4):
        eventually(lambda deaths=deaths: harness.applied(training.job) >= deaths * 200)
        harness.server.kill()
        harness.start_server()
    eventually(lambda: harness.applied(training.job) >= 2000)
    beats = [training.heartbeat(worker) for worker in workers]

    # Then what is stored at the end lacks nothing of any update
    training.finish()
    assert harness.vector(training.job).tolist() == pytest.approx([EPOCHS] * SAMPLES, abs=1e-3)
    # and workers fetched whole snapshots only at first, and after a death.
    for beat in beats:
        assert beat.pushes > 20
        assert (beat.fetched_bytes or 0) < 4 * SAMPLES * (4 + beat.pushes / 4)

"""A backup of the ledger's disk, restored into a new server, with training under way."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.harness import Harness, RedisServer
from support.training import Training, running
from support.waiting import await_truth

#: Seconds per local step: the backup becomes old while little is trained.
STEP_SECONDS = 0.02


class LedgerDisk:
    """The disk of a ledger that runs alone on its machine, and its snapshots."""

    def __init__(self, harness: Harness) -> None:
        assert isinstance(harness.ledger, RedisServer)
        self.server = harness.ledger
        self._home = harness.home

    def snapshot(self) -> Path:
        """Copy the disk at one moment, while the server runs, as clouds do."""
        copy = self._home / "snapshot"
        self.server.process.freeze()
        shutil.copytree(self.server.files.directory, copy, ignore=shutil.ignore_patterns("*.sock"))
        self.server.process.thaw()
        assert list(copy.glob("appendonlydir/*.aof")), "the snapshot has no append-only file"
        return copy

    def replace(self, snapshot: Path) -> None:
        """Kill the server, lose its disk, and start one with a disk from the snapshot."""
        self.server.kill()
        shutil.rmtree(self.server.files.directory)
        shutil.copytree(snapshot, self.server.files.directory)
        self.server.start()


def known_samples(training: Training) -> int:
    """Return the samples that are applied, as far as the ledger knows."""
    samples: int = training.harness.jobs.get(training.job).totals.get("samples", 0)
    return samples


def test_training_goes_on_with_a_restored_ledger(harness: Harness) -> None:
    # Given a job, a snapshot of the ledger, and training after it
    training = running(harness, applied=60, samples=400, epochs=3, step_seconds=STEP_SECONDS)
    disk = LedgerDisk(harness)
    snapshot = disk.snapshot()
    copied = known_samples(training)
    training.await_more_samples(400)
    # The ledger learns of them beside the work.
    known = await_truth(lambda: (now := known_samples(training)) > copied and now)

    # When the ledger's machine is lost with its disk, and the disk is made from the snapshot
    harness.server.freeze()
    disk.replace(snapshot)
    assert known_samples(training) < known, "the ledger is not older"
    harness.server.thaw()

    training.finish()


@pytest.mark.ci
def test_job_continues_with_a_restored_ledger_after_everything_is_lost(harness: Harness) -> None:
    # Given a job with a checkpoint that is newer than the snapshot of the ledger
    training = running(harness, applied=60, samples=400, epochs=3, step_seconds=STEP_SECONDS)
    disk = LedgerDisk(harness)
    snapshot = disk.snapshot()
    training.await_more_samples(200)
    harness.checkpoint(training.job)
    training.await_more_samples(100)

    # When all machines are lost, and the ledger is restored
    for worker in harness.workers.values():
        worker.kill()
    harness.server.kill()
    tensors = harness.tensors
    assert isinstance(tensors, RedisServer)
    tensors.kill()
    disk.replace(snapshot)
    tensors.start()

    harness.start_server()
    training.add_workers(2)
    training.finish()

"""A shard that volunteers send updates to: who they belong to, and what becomes of wrong ones."""

from __future__ import annotations

import pytest
import torch
from support.world import MakeWorld, World
from torch import Tensor

from vcasgd.parameter_server import reports
from vcasgd.parameter_server.reports import REJECTIONS_BEFORE_QUARANTINE
from vcasgd.parameter_server.shard import Shard
from vcasgd.store.ledger.leases import Lease
from vcasgd.store.ledger.placement import Owners, Suspect
from vcasgd.verification.screening import FAR_TOO_LONG, WINDOW

OWNERS = ("alice", "bob", "carol", "mallory")
#: Updates of each owner before one turns hostile, and after.
BEFORE, AFTER = WINDOW + 8, WINDOW


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "TUNED_SECONDS", 0.0)


class Strangers:
    """Volunteers that each push one sample at a time, as a vector near its own coordinate."""

    def __init__(self, make_world: MakeWorld) -> None:
        self.world = make_world(samples=400, epochs=3, subtasks_per_epoch=100)
        self.owners = Owners(self.world.ledger)
        self.workers = {owner: f"{self.world.job}.join-{owner}-1" for owner in OWNERS}
        self.owners.place(
            {self.world.job: {worker: owner for owner, worker in self.workers.items()}}
        )
        self._next = iter((subtask, at) for subtask in range(300) for at in range(4))
        self._random = torch.Generator().manual_seed(1)
        self._common = torch.randn(8, self.world.layout.floats, generator=self._random)

    def honest(self) -> Tensor:
        return torch.randn(8, generator=self._random) @ self._common

    def noise(self) -> Tensor:
        return 8**0.5 * torch.randn(self.world.layout.floats, generator=self._random)

    def next_subtask(self) -> None:
        """Leave out the other samples of a subtask whose first update was rejected."""
        while next(self._next)[1] < 3:
            pass

    def push(self, shard: Shard, owner: str, vector: Tensor, rollbacks: int = 0) -> str:
        subtask, at = next(self._next)
        header, pushed = self.world.push(
            subtask, at, at + 1, worker=self.workers[owner], vector=vector, rollbacks=rollbacks
        )
        assert pushed.accepted
        shard.turn()
        return self.world.fate(header)

    def work(self, shard: Shard, rounds: int, *, hostile: bool = False) -> list[str]:
        """Push an update of each owner in turn; return the fates of the last one's."""
        fates = []
        for _ in range(rounds):
            for owner in OWNERS:
                wrong = hostile and owner == "mallory"
                fates.append(self.push(shard, owner, self.noise() if wrong else self.honest()))
        return fates[len(OWNERS) - 1 :: len(OWNERS)]


@pytest.mark.ci
def test_an_owner_of_noise_is_named_and_the_applied_record_goes_back_with_its_work(
    make_world: MakeWorld,
) -> None:
    # Given a job with a checkpoint, and four owners that have worked since then
    strangers = Strangers(make_world)
    world, shard = strangers.world, strangers.world.shard()
    strangers.work(shard, 2)
    stored, before = world.checkpoint(), world.positions()
    weights = world.vector()
    strangers.work(shard, BEFORE)
    world.checkpoint()

    # When one of them sends noise
    fates = strangers.work(shard, AFTER, hostile=True)
    shard.turn()

    # Then it is named, and from then on its updates are refused
    (event,) = world.events("owner-quarantined")
    assert event["details"]["owner"] == "mallory"
    assert "in common" in event["text"]
    assert list(world.jobs.workers.quarantined(world.job)) == [strangers.workers["mallory"]]
    assert fates[0] == "applied"
    assert fates[-1] == "rejected:suspect"
    assert not world.events("update-rejected")
    suspect = world.jobs.get(world.job).tuned.suspects["mallory"]
    assert suspect.version is not None

    # and its samples and all others since then are open again when the controller goes back
    assert world.jobs.roll_back(world.job, 1, stored.name, "", restorations=1, undone=["mallory"])
    version = world.snapshots.read().meta.version
    # An open update of before
    late = strangers.push(shard, "alice", strangers.honest())
    shard.turn()
    snapshot = world.snapshots.read()
    assert late in ("rejected:rolled-back", "applied", "lost")
    assert world.positions() == before
    assert torch.equal(world.vector(), weights)
    assert snapshot.meta.version > version
    assert (snapshot.meta.rollbacks, snapshot.meta.restorations) == (1, 1)
    assert snapshot.meta.totals.samples == sum(before.values())
    assert world.jobs.get(world.job).totals["repeated"] == 0
    lease = world.leases("alice").acquire()
    assert isinstance(lease, Lease)
    assert lease.number <= max(before) + 1

    # and the next life of the server knows all of that
    again = world.shard()
    again.turn()
    assert world.positions() == before
    assert world.jobs.get(world.job).tuned.learning_rate == 1.0


def test_an_owner_of_refused_updates_is_named_and_its_applied_ones_are_undone(
    make_world: MakeWorld,
) -> None:
    # Given owners that have worked for a while
    strangers = Strangers(make_world)
    world, shard = strangers.world, strangers.world.shard()
    strangers.work(shard, BEFORE)

    # When one of them sends updates that are so long that each is refused
    fates = []
    for _ in range(REJECTIONS_BEFORE_QUARANTINE):
        fates.append(strangers.push(shard, "mallory", 4 * FAR_TOO_LONG * strangers.honest()))
        strangers.next_subtask()

    # Then it is named, and what it did before is in doubt
    assert fates == ["rejected:screened"] * REJECTIONS_BEFORE_QUARANTINE
    suspect = world.jobs.get(world.job).tuned.suspects["mallory"]
    assert suspect.why.startswith(f"{REJECTIONS_BEFORE_QUARANTINE} updates in a row")
    assert suspect.version == OWNERS.index("mallory"), "the version of its first update"


def test_samples_that_are_open_again_are_trained_once(make_world: MakeWorld) -> None:
    # Given a shard that went back behind two subtasks, of which one was done
    world = make_world()
    shard = world.shard()
    stored = world.checkpoint()
    for subtask, start, stop in ((0, 0, 2), (0, 2, 4), (1, 0, 2)):
        world.push(subtask, start, stop)
        shard.turn()
    assert world.jobs.roll_back(world.job, 1, stored.name, "", restorations=1, undone=["x"])
    shard.turn()
    shard.turn()
    assert world.positions() == {}

    # When they are trained again
    for subtask, start, stop in ((0, 0, 4), (1, 0, 4)):
        _, pushed = world.push(subtask, start, stop, token=2, rollbacks=1)
        if not pushed.accepted:
            # The server still knew the position that an earlier update had reached.
            world.push(subtask, pushed.position, stop, token=2, rollbacks=1)
            shard.turn()
            assert world.push(subtask, start, stop, token=2, rollbacks=1)[1].accepted
        shard.turn()

    # Then each sample is in the model once
    world.assert_exact()
    assert world.positions() == {0: 4, 1: 4}


def test_a_new_machine_of_a_suspect_gets_no_work(world: World) -> None:
    owners = Owners(world.ledger)
    assert owners.accuse(world.job, "mallory", Suspect(why="noise"))
    assert not owners.accuse(world.job, "mallory", Suspect(why="again"))

    owners.place({world.job: {"job.join-mallory-2": "mallory", "job.join-bob-1": "bob"}})

    assert world.jobs.workers.quarantined(world.job) == {"job.join-mallory-2": "noise"}

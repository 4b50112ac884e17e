"""The parameter server's side: whose update it is, what it looks like, and what follows.

Does nothing until the first update of a volunteer's machine.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Collection, Iterable

from vcasgd.errors import InvalidUpdate
from vcasgd.parameter_server.blend import ModelState
from vcasgd.parameter_server.reports import REJECTIONS_BEFORE_QUARANTINE, Reports
from vcasgd.parameter_server.verification import ServerVerification
from vcasgd.spec.job import JobSpec
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import TensorKeys
from vcasgd.store.ledger.machines import PREFIX
from vcasgd.store.ledger.placement import Owners, Suspect
from vcasgd.store.tensors.header import Header
from vcasgd.verification.exchange import RepetitionExchange
from vcasgd.verification.judge import why_not_repeatable
from vcasgd.verification.repetitions import Repetitions
from vcasgd.verification.screening import OWN, Measure, Screening

#: Reason of the rejection of an update that differs too much from those of others.
SCREENED = "screened"
#: Reason of the rejection of all updates of an owner that gets no more work.
SUSPECT = "suspect"


class VolunteerVerification(ServerVerification):
    """Judge of one shard's updates, by their owners.

    Each shard judges its own part of the updates. One shard's judgement excludes an owner from all
    shards, by the ledger; until then, a part that is refused is open in its own shard only.
    """

    def __init__(
        self,
        spec: JobSpec,
        keys: TensorKeys,
        shards: int,
        ledger: RedisClient,
        tensors: RedisClient,
        reports: Reports,
    ) -> None:
        self._ledger = Owners(ledger)
        self._keys = keys
        self._reports = reports
        several = "the job has several shards" if shards > 1 else None
        self._repetitions = Repetitions(
            RepetitionExchange(tensors, keys),
            reports,
            self._accuse,
            several or why_not_repeatable(spec),
            announces=keys.shard == 0,
        )
        #: Worker → owner.
        self._owners: dict[str, str] = {}
        self._excluded: frozenset[str] = frozenset()
        self._screening: Screening | None = None
        #: Measure of the update that was checked last, if it is screened.
        self._measure: Measure | None = None
        #: Updates of an owner refused in a row.
        self._refused: Counter[str] = Counter()

    def turn(self, model: ModelState) -> None:
        self._repetitions.turn(model)

    def check(self, header: Header, model: ModelState) -> None:
        self._measure, owner = None, self._owner(header.worker)
        if owner == OWN:
            self._repetitions.note_helper(header)
        if self._screening is None:
            if owner == OWN:
                return
            self._screening = Screening(model.weights.numel(), secrets.randbits(63))
        if owner in self._excluded:
            raise InvalidUpdate(f"owner {owner} gets no more work", reason=SUSPECT)
        samples = header.stop - header.start
        measure = self._screening.measure(
            model.step_of(header), model.weights, model.parameters, samples
        )
        why = self._screening.refusal(owner, measure)
        if why is not None:
            self._refused[owner] += 1
            if self._refused[owner] >= REJECTIONS_BEFORE_QUARANTINE:
                # Those before may have been just short enough.
                self._accuse(owner, f"{self._refused[owner]} updates in a row: {why}")
            raise InvalidUpdate(why, reason=SCREENED)
        if owner != OWN:
            self._repetitions.check(owner, header, model)
        self._measure = measure

    def applied(self, header: Header, version: int) -> None:
        if self._measure is None or self._screening is None:
            return
        owner = self._owners[header.worker]
        self._refused.pop(owner, None)
        if owner != OWN:
            self._repetitions.applied(owner, header, version)
        if why := self._screening.add(owner, self._measure, version):
            self._accuse(owner, why)

    def restart(self) -> None:
        if self._screening is not None:
            self._screening.restart()
            self._repetitions.restart()

    def lose(self, workers: Collection[str]) -> None:
        self._repetitions.lose(workers)

    def exclude(self, owners: Iterable[str]) -> None:
        self._excluded = self._excluded.union(owners)

    def _owner(self, worker: str) -> str:
        owner = self._owners.get(worker)
        if owner is None:
            owner = OWN
            # Only machines that joined can belong to others; no other one needs the ledger.
            if f".{PREFIX}" in worker:
                owner = self._ledger.owner(self._keys.job, worker) or OWN
                self.exclude(self._ledger.suspects(self._keys.job))
            self._owners[worker] = owner
        return owner

    def _accuse(self, owner: str, why: str, version: int | None = None) -> None:
        """Refuse an owner's updates from now on, and report it.

        Its updates may be wrong after ``version``, and so may all that screening remembers.
        """
        screened = self._screening.version_before(owner) if self._screening else None
        before = min((each for each in (version, screened) if each is not None), default=None)
        self.exclude([owner])
        self._reports.accuse(owner, Suspect(why=why, shard=int(self._keys.shard), version=before))

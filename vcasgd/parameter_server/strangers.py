"""Updates of machines that belong to others: whose they are, and what they look like.

Does nothing until the first update of a volunteer's machine.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Collection, Iterable

import torch

from vcasgd.errors import InvalidUpdate
from vcasgd.learning.screening import OWN, Measure, Screening, Sketcher
from vcasgd.parameter_server.model_state import ModelState
from vcasgd.parameter_server.repetitions import Repetitions
from vcasgd.parameter_server.reports import REJECTIONS_BEFORE_QUARANTINE, Reports
from vcasgd.store.ledger.joined_machines import PREFIX
from vcasgd.store.ledger.owners import Owners, Suspect
from vcasgd.store.tensors.header import Header
from vcasgd.store.tensors.repetitions import RepetitionExchange

#: Reason of the rejection of an update that differs too much from those of others.
SCREENED = "screened"
#: Reason of the rejection of all updates of an owner that gets no more work.
SUSPECT = "suspect"


class Strangers:
    """Screening of one shard's updates by their owners.

    Each shard judges its own part of the updates. One shard's judgement excludes an owner from all
    shards, by the ledger; until then, a part that is refused is open in its own shard only.
    """

    def __init__(
        self,
        owners: Owners,
        job: str,
        shard: int,
        reports: Reports,
        exchange: RepetitionExchange,
        why_not: str | None,
    ) -> None:
        """``why_not``: why the job's updates can't be repeated, if that is so."""
        self._ledger = owners
        self._job, self._shard = job, shard
        self._reports = reports
        self._repetitions = Repetitions(
            exchange, reports, self._accuse_repeated, why_not, tells=shard == 0
        )
        #: Worker → owner.
        self._owners: dict[str, str] = {}
        self._excluded: frozenset[str] = frozenset()
        self._screening: Screening | None = None
        self._sketcher: Sketcher | None = None
        #: Updates of an owner refused in a row.
        self._refused: Counter[str] = Counter()

    def check(self, header: Header, model: ModelState) -> Measure | None:
        """Screen an update that is received and checked. Return its measure, if it is screened.

        Raises :class:`InvalidUpdate`, and :class:`~vcasgd.errors.StoreUnavailable` while the owner
        of a machine that joined can't be read.
        """
        owner = self._owner(header.worker)
        if owner == OWN:
            self._repetitions.own(header)
        if self._screening is None:
            if owner == OWN:
                return None
            self._screening = Screening()
            self._sketcher = Sketcher(model.weights.numel(), secrets.randbits(63))
        if owner in self._excluded:
            raise InvalidUpdate(f"owner {owner} gets no more work", reason=SUSPECT)
        measure = self._measure(header, model)
        why = self._screening.refusal(owner, measure)
        if why is not None:
            self._refused[owner] += 1
            if self._refused[owner] >= REJECTIONS_BEFORE_QUARANTINE:
                # Those before may have been just short enough.
                before = self._screening.version_before(owner)
                self._accuse(owner, f"{self._refused[owner]} updates in a row: {why}", before)
            raise InvalidUpdate(why, reason=SCREENED)
        if owner != OWN:
            self._repetitions.check(owner, header, model)
        return measure

    def applied(self, header: Header, measure: Measure | None, version: int) -> None:
        """Take note of an update that was applied to ``version``."""
        if measure is None or self._screening is None:
            return
        owner = self._owners[header.worker]
        self._refused.pop(owner, None)
        if owner != OWN:
            self._repetitions.applied(owner, header, version)
        suspicion = self._screening.add(owner, measure, version)
        if suspicion is not None:
            self._accuse(owner, suspicion.why, suspicion.version)

    def restart(self) -> None:
        """Forget what updates looked like, because the model went back."""
        if self._screening is not None:
            self._screening = Screening()
            self._repetitions.restart()

    def remember(self, model: ModelState) -> None:
        """Keep what workers train from, before the next updates; see :class:`Repetitions`."""
        if not model.batch.pending:
            self._repetitions.remember(model)

    def turn(self) -> None:
        """Continue the repetition of an update. Call it before updates are published: workers have
        to see a request for their states before they see that an update was applied.

        Raises as the client of the tensors server does.
        """
        self._repetitions.turn()

    def lose(self, workers: Collection[str]) -> None:
        """Wait for lost workers no longer."""
        self._repetitions.lose(workers)

    def exclude(self, owners: Iterable[str]) -> None:
        """Refuse all updates of owners that a shard has accused."""
        self._excluded = self._excluded.union(owners)

    def _owner(self, worker: str) -> str:
        owner = self._owners.get(worker)
        if owner is None:
            owner = OWN
            # Only machines that joined can belong to others; no other one needs the ledger.
            if f".{PREFIX}" in worker:
                owner = self._ledger.owner(self._job, worker) or OWN
                self.exclude(self._ledger.suspects(self._job))
            self._owners[worker] = owner
        return owner

    def _measure(self, header: Header, model: ModelState) -> Measure:
        assert self._sketcher is not None
        step = model.step_of(header)
        parameters = model.parameters
        drift = step[parameters:].clone()
        step[parameters:] = 0.0
        return Measure(
            norm=float(torch.linalg.vector_norm(step)),
            drift=float(torch.linalg.vector_norm(drift)),
            samples=header.stop - header.start,
            sketch=self._sketcher.sketch(step),
            model=self._sketcher.sketch(model.weights),
        )

    def _accuse_repeated(self, owner: str, why: str, version: int) -> None:
        """Accuse an owner for wrong updates that were applied after a version."""
        screened = self._screening.version_before(owner) if self._screening else None
        self._accuse(owner, why, version if screened is None else min(version, screened))

    def _accuse(self, owner: str, why: str, version: int | None) -> None:
        self.exclude([owner])
        self._reports.accuse(owner, Suspect(why=why, shard=self._shard, version=version))

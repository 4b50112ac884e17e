"""A worker's part in repetitions, which its training loop calls between and around intervals."""

from __future__ import annotations

from typing import Any

from vcasgd.worker.interval import Base
from vcasgd.worker.learner import Learner


class RepetitionDuty:
    """Does nothing. Its calls come from the training thread."""

    #: True if a new optimizer may take over second moments of other workers.
    adopts = True
    #: True if an interval may start from a version and an own update that the version lacks.
    overlaps = True

    def serve(self, learner: Learner) -> bool:  # noqa: ARG002
        """Do what the parameter server asks for, before an interval; return True if that was
        anything.

        Raises :class:`~vcasgd.errors.StoreUnavailable`.
        """
        return False

    def begin(self, learner: Learner, base: Base) -> None:
        """Prepare for an interval from a base, which follows at once."""

    def end(self, learner: Learner, planned: int) -> dict[str, Any]:  # noqa: ARG002
        """Return fields of the header of the interval's update, which was to end at ``planned``."""
        return {}

    def submitted(self, update: str) -> None:
        """Record the name of the interval's update."""

    def rejected(self, reason: str) -> None:
        """Record why an update of this worker was rejected."""
